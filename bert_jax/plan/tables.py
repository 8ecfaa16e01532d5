# SPDX-License-Identifier: Apache-2.0
"""Plans as lines of text."""

from bert_jax.devices.chips import GIB
from bert_jax.plan.planner import Plan

_MOST = 12  # plans of a search that are shown


def plan_table(plan: Plan) -> list[str]:
    """Returns a plan in lines of text."""
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    lines = [
        f"{plan.topology}: {plan.num_chips} x {plan.device_kind}, mesh {axes}; by {plan.source}",
        f"{plan.batch_size:,} rows of {plan.row_length} tokens, {plan.rows_per_chip} a chip, "
        f"{plan.predictions} places for predictions a row",
        plan.choices,
        "fits: " + ("yes" if plan.fits else f"NO. {plan.problem}"),
        "",
        f"{'memory of a chip, GiB':<28}{plan.source:>18}{'by arithmetic':>16}",
    ]
    for kind in sorted(
        dict.fromkeys([*plan.bytes, *plan.estimate]), key=("total", "held at once").count
    ):
        cells = [
            f"{table[kind] / GIB:.3f}" if kind in table else ""
            for table in (plan.bytes, plan.estimate)
        ]
        lines.append(f"  {kind:<26}{cells[0]:>18}{cells[1]:>16}".rstrip())
    lines += [
        f"  {'of the chip':<26}{plan.hbm_bytes / GIB:>18.3f}",
        "",
        "communication of a chip in a step",
    ]
    lines += [
        f"  {traffic.kind:<20}{traffic.dtype:<12}{traffic.count:>6} times {traffic.bytes / 1e6:>12,.3f} MB in all, "
        f"groups of {traffic.group_size}"
        for traffic in plan.collectives
    ] or ["  none"]
    lines += [
        "",
        "arithmetic of a chip in a step",
        f"  model's FLOPs             {plan.model_flops:>18,.0f}",
    ]
    if plan.compiled_flops:
        ratio = plan.compiled_flops / plan.model_flops
        lines.append(
            f"  compiled FLOPs            {plan.compiled_flops:>18,.0f}   {ratio:.3f} of the model's"
        )
    if plan.moved_bytes:
        lines.append(
            f"  compiled bytes of HBM     {plan.moved_bytes:>18,.0f}   read and written, loops in full"
        )
    if plan.bound:
        step = plan.bound_seconds
        parts = ", ".join(f"{name} {1e3 * part:,.1f}" for name, part in plan.bound.items())
        lines += [
            "",
            f"bound on a step: {1e3 * step:,.1f} ms, {plan.batch_size / step:,.0f} rows/s, "
            f"{plan.batch_size / step / plan.num_chips:,.1f} a chip, MFU {plan.bound_mfu:.1%}",
            f"  {parts} ms: compiled FLOPs and bytes at the data sheet's peaks, nothing overlapped. No device has "
            "measured it; the one step that was measured took about twice its bound",
        ]
    return [*lines, f"compiled in {plan.compile_seconds:.0f} s"]


def search_table(plans: list[Plan]) -> list[str]:
    """Returns the first plans of a search, one in a line, and the flags of the first."""
    titles = f"{'bound, ms':>9}{'rows/s':>10}{'MFU':>8}{'fits':>6}{'GiB a chip':>12}{'of':>8}"
    lines = [f"{titles}  settings; by {plans[0].source}"]
    for plan in plans[:_MOST]:
        total = next(
            (
                plan.bytes[kind]
                for kind in ("held at once", "total", "temporaries")
                if plan.bytes.get(kind)
            ),
            0,
        )
        step = plan.bound_seconds
        rows_per_second = f"{plan.batch_size / step:,.0f}" if step else ""
        axes = (
            " x ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1)
            or "one device"
        )
        settings = " ".join(
            flag.removeprefix("--config.") for flag in plan.flags if ".mesh." not in flag
        )
        lines.append(
            f"{1e3 * step:>9,.1f}{rows_per_second:>10}{plan.bound_mfu:>8.1%}{'yes' if plan.fits else 'NO':>6}"
            f"{total / GIB:>12.2f}{plan.hbm_bytes / GIB:>8.2f}  {axes}; {settings or 'as given'}"
        )
    if len(plans) > _MOST:
        lines.append(f"and {len(plans) - _MOST} more; --json=FILE has all")
    if not plans[0].fits:
        return [*lines, "", f"nothing fits: {plans[0].problem}"]
    flags = " ".join(plans[0].flags) or "nothing, it is as given"
    return [
        *lines,
        "",
        "the lowest bound, which no device has measured; add to the command:",
        f"  {flags}",
    ]
