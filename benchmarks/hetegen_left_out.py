"""What HeteGen does not do, and what it would save: virtual time, the same on every machine.

    python benchmarks/hetegen_left_out.py

Pairing: the up and down projections of an MLP as one call, split by columns and then by rows. It
would save one call per MLP; the table counts the whole time of a call as saved. Experts known:
copies go on into the experts that the router will choose, as if these were known a token before.
"""

from __future__ import annotations

from dataclasses import replace

from measure import print_head, print_row

from wf_backends.hetegen import Plan, Rates
from wf_backends.hetegen.weights.jobs import SimulatedDevice
from wf_backends.hetegen.weights.plan import Linear, Request, Split
from wf_backends.hetegen.weights.planning import make_plan

BF16 = 2  # bytes
NUM_EXPERTS = 8
CHOSEN_EXPERTS = ("0", "2")  # in each layer
RATES = Rates(link=25e9, host=60e9, accelerator=500e9, memory=80e9)
CALL_SECONDS = (5e-5, 1e-4, 2e-4)


def main() -> None:
    print("link 25, host 60, accelerator 500, host memory 80 GB/s, bfloat16, one token\n")
    print_head("", "memory", "a call", "a token", "saved at most")
    dense_models = {"7B": llama(4096, 11008, 32), "13B": llama(5120, 13824, 40)}
    for name, linears in dense_models.items():
        num_mlps = sum(linear.name.endswith("up") for linear in linears)
        for call_seconds in CALL_SECONDS:
            plan = plan_for(linears, call_seconds)
            saved = num_mlps * call_seconds / plan.decode_seconds
            print_plan(f"pairing, Llama {name}", plan, saved)
    for name, alpha in (("best alpha", None), ("streaming alone", 0.0)):
        plan = plan_for(mixtral(4096, 14336, 32), 1e-4, alpha)
        known = replace(plan, splits=tuple(as_dense(split) for split in plan.splits))
        saved = 1 - last_pass_seconds(known) / last_pass_seconds(plan)
        print_plan(f"experts known, Mixtral 8x7B, {name}", plan, saved)


def plan_for(linears: tuple[Linear, ...], call_seconds: float, alpha: float | None = None) -> Plan:
    """The plan if accelerator memory is a quarter of the weights; alpha None = the best alpha."""
    memory = sum(linear.nbytes for linear in linears) // 4
    rates = replace(RATES, call_seconds=call_seconds)
    return make_plan(Request(linears, rates, memory, alpha=alpha))


def print_plan(name: str, plan: Plan, saved: float) -> None:
    """Print a row; `saved` is a share of the time of a token."""
    memory = f"{plan.request.accelerator_bytes / 1e9:.1f} GB"
    call = f"{1e6 * plan.rates.call_seconds:.0f} us"
    print_row(name, memory, call, f"{plan.decode_seconds:.4f} s", f"{100 * saved:.1f} %")


def last_pass_seconds(plan: Plan) -> float:
    """Seconds of the last of 4 decoding passes, all with the same experts."""
    device = SimulatedDevice(plan)
    called: list[int] = []
    for index, linear in enumerate(plan.request.linears):
        if not linear.expert or linear.expert.split(".")[1] in CHOSEN_EXPERTS:
            called.append(index)
    return [device.run_pass(called, "decode") for _ in range(4)][-1]


def as_dense(split: Split) -> Split:
    """The same split of a linear that belongs to no expert, so that copies go on into it."""
    return replace(split, linear=replace(split.linear, expert=""))


def attention(layer: int, hidden: int, kv_width: int) -> list[Linear]:
    """The linears q, k, v, o of a layer."""
    out_features = {"q": hidden, "k": kv_width, "v": kv_width, "o": hidden}
    return [Linear(f"{layer}.{name}", rows, hidden, BF16) for name, rows in out_features.items()]


def mlp(
    name: str, hidden: int, intermediate: int, expert: str = "", routed: float = 1.0
) -> list[Linear]:
    """The linears of a gated MLP; `routed` is the share of the tokens that are routed to it."""
    up, down = (intermediate, hidden), (hidden, intermediate)  # out_features, in_features
    sizes = {"gate": up, "up": up, "down": down}
    return [Linear(f"{name}.{part}", *size, BF16, expert, routed) for part, size in sizes.items()]


def llama(hidden: int, intermediate: int, layers: int) -> tuple[Linear, ...]:
    """The linears of a Llama in the order of their calls."""
    linears: list[Linear] = []
    for layer in range(layers):
        linears += attention(layer, hidden, hidden)
        linears += mlp(str(layer), hidden, intermediate)
    return (*linears, Linear("head", 32000, hidden, BF16))


def mixtral(hidden: int, intermediate: int, layers: int) -> tuple[Linear, ...]:
    """The linears of a Mixtral with 2 of 8 experts for a token, in the order of their calls."""
    linears: list[Linear] = []
    for layer in range(layers):
        linears += attention(layer, hidden, hidden // 4)
        for expert in range(NUM_EXPERTS):
            name = f"{layer}.{expert}"
            linears += mlp(name, hidden, intermediate, expert=name, routed=2 / NUM_EXPERTS)
    return (*linears, Linear("head", 32000, hidden, BF16))


if __name__ == "__main__":
    main()
