"""What HeteGen does not do, and what it would save: virtual time, the same on every machine.

    python benchmarks/hetegen_left_out.py

Pairing: an MLP's up and down projections as one call, by columns then rows, which saves one join
for each MLP; counted as if a join were all that a call takes. Experts: copies that run on into the
experts which the router will choose, as if they were known a token before.
"""

from __future__ import annotations

from dataclasses import replace

from wf_backends.hetegen import Plan, Rates
from wf_backends.weights.jobs import SimulatedDevice
from wf_backends.weights.plan import Linear, Request, Split
from wf_backends.weights.planning import make_plan

BF16 = 2
CHOSEN = ("0", "2")  # of the experts of each layer
RATES = Rates(link=25e9, host=60e9, accelerator=500e9, memory=80e9)
CALLS = (5e-5, 1e-4, 2e-4)


def main() -> None:
    print("link 25, host 60, accelerator 500, host memory 80 GB/s, bfloat16, one token\n")
    print("| | memory | a call | a token | saved at most |\n|---|---|---|---|---|")
    dense = {"7B": llama(4096, 11008, 32), "13B": llama(5120, 13824, 40)}
    for name, linears in dense.items():
        for call in CALLS:
            plan = planned(linears, call)
            saved = call * sum(x.name.endswith("up") for x in linears) / plan.decode_seconds
            show(f"pairing, Llama {name}", plan, saved)
    for alpha in (None, 0.0):
        plan = planned(mixtral(4096, 14336, 32), CALLS[1], alpha)
        known = replace(plan, splits=tuple(map(without_expert, plan.splits)))
        saved = 1 - last_pass(known) / last_pass(plan)
        name = "streaming alone" if alpha == 0 else "best alpha"
        show(f"experts known, Mixtral 8x7B, {name}", plan, saved)


def planned(linears: tuple[Linear, ...], call: float, alpha: float | None = None) -> Plan:
    """With memory for a quarter of the weights."""
    memory = sum(linear.nbytes for linear in linears) // 4
    return make_plan(Request(linears, replace(RATES, call_seconds=call), memory, alpha=alpha))


def show(name: str, plan: Plan, saved: float) -> None:
    call = 1e6 * plan.rates.call_seconds
    memory = plan.request.accelerator_bytes / 1e9
    print(
        f"| {name} | {memory:.1f} GB | {call:.0f} us | {plan.decode_seconds:.4f} s "
        f"| {100 * saved:.1f} % |"
    )


def last_pass(plan: Plan) -> float:
    """Seconds of a decoding pass, after others with the same experts."""
    device, linears = SimulatedDevice(plan), plan.request.linears
    order = [i for i, x in enumerate(linears) if not x.expert or x.expert.split(".")[1] in CHOSEN]
    return [device.run_pass(order, "decode") for _ in range(4)][-1]


def without_expert(split: Split) -> Split:
    """The same rows, for which copies run on as for all other linears."""
    return replace(split, linear=replace(split.linear, expert=""))


def attention(layer: int, hidden: int, key_values: int) -> list[Linear]:
    rows = {"q": hidden, "k": key_values, "v": key_values, "o": hidden}
    return [Linear(f"{layer}.{name}", n, hidden, BF16) for name, n in rows.items()]


def mlp(name: str, hidden: int, inner: int, expert: str = "", routed: float = 1.0) -> list[Linear]:
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return [Linear(f"{name}.{n}", *size, BF16, expert, routed) for n, size in sizes.items()]


def llama(hidden: int, inner: int, layers: int) -> tuple[Linear, ...]:
    found = [Linear("head", 32000, hidden, BF16)]
    for layer in range(layers):
        found += attention(layer, hidden, hidden) + mlp(str(layer), hidden, inner)
    return (*found[1:], found[0])


def mixtral(hidden: int, inner: int, layers: int) -> tuple[Linear, ...]:
    found = [Linear("head", 32000, hidden, BF16)]
    for layer in range(layers):
        found += attention(layer, hidden, hidden // 4)
        for expert in range(8):
            name = f"{layer}.{expert}"
            found += mlp(name, hidden, inner, expert=name, routed=2 / 8)
    return (*found[1:], found[0])


if __name__ == "__main__":
    main()
