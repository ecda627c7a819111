"""A LightningModule that attaches its model trains on two ranks as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402

pytestmark = pytest.mark.processes

TRAIN = """
import sys
import lightning, torch, torch.distributed as dist
import wf_transformers
from tests.integrations.deepspeed_jobs import VOCABULARY, tiny_llama
from wf_backends import SequenceParallel, SequenceParallelConfig

ranks, path = int(sys.argv[1]), sys.argv[2]
tokens = torch.randint(VOCABULARY, (8, 46), generator=torch.Generator().manual_seed(3))
dataset = [{"input_ids": row, "labels": row} for row in tokens]
losses = []


class OneProcess(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.handle = tiny_llama().double(), None

    def train_dataloader(self):
        return torch.utils.data.DataLoader(dataset, batch_size=2)

    def loss(self, batch):
        logits = self.model(batch["input_ids"]).logits[:, :-1]  # the model's loss is in float32
        targets = batch["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)  # as float32
        losses.append(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OnRanks(OneProcess):
    def configure_model(self):
        if self.handle is None:
            config = SequenceParallelConfig(sequence_parallel_size=ranks)
            sp = SequenceParallel(config, dist.new_group())
            self.handle = wf_transformers.attach(self.model, sp)

    def train_dataloader(self):
        return self.handle.prepare_dataloader(dataset, batch_size=2)

    def loss(self, batch):
        local = self.handle.shard_batch(batch)
        logits = self.model(**wf_transformers.forward_kwargs(self.model, local)).logits
        return self.handle.loss(logits, local["labels"])


module = OneProcess() if ranks == 1 else OnRanks()
options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "gradient_clip_val": 0.5}
trainer = lightning.Trainer(
    devices=ranks,
    strategy="auto" if ranks == 1 else "ddp",
    enable_checkpointing=False,
    enable_progress_bar=False,
    **options,
)
trainer.fit(module)
if trainer.is_global_zero:
    torch.save({"losses": losses, "weights": module.model.state_dict()}, path)
"""


def test_ddp_trains_as_one_process(tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2):
        path = tmp_path / f"{ranks}.pt"
        run_ranks(["-c", TRAIN, str(ranks), str(path)], ranks)
        results.append(torch.load(path))
    expected, actual = results
    assert len(expected["losses"]) == 4
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-7)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-7, atol=1e-7)
