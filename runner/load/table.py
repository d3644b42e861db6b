"""One line a concurrency, in the form people paste into threads, with what the number is and what explains it."""

from runner.schema.trial import Measurement


def level_line(found: Measurement) -> str:
    """One level as one line.

    ``C=   1 |  10/ 10 ok (0 err) | wall=  22.8s |    56.1 tok/s | requests``
    """
    total = found.requests_ok + found.requests_failed
    wall = "     -" if found.wall_s is None else f"{found.wall_s:6.1f}s"
    rate = "      -" if found.output_tok_s is None else f"{found.output_tok_s:7.1f}"
    head = f"C={found.concurrency:4d} | {found.requests_ok:3d}/{total:3d} ok ({found.requests_failed} err)"
    parts = [head, f"wall={wall}", f"{rate} tok/s", _protocol(found)]
    parts += [part for part in (_explained(found), _unchecked(found), _reason(found)) if part]
    return " | ".join(parts)


def _protocol(found: Measurement) -> str:
    if found.protocol == "requests":
        return "requests"
    if not found.windows_tok_s:
        return "steady"
    text = f"steady {len(found.windows_tok_s)} x {found.window_s or 0:.0f} s"
    if found.interval_tok_s is not None and found.output_tok_s:
        low, high = found.interval_tok_s
        text += f" ±{(high - low) / 2 / found.output_tok_s:.1%}"
    return text


def _explained(found: Measurement) -> str:
    parts = []
    if found.acceptance_rate is not None:
        parts.append(f"accepted {found.acceptance_rate:.0%}")
    if found.acceptance_length is not None:
        parts.append(f"{found.acceptance_length:.2f} a step")
    if found.prefix_hit_rate:
        parts.append(f"prefix hits {found.prefix_hit_rate:.0%}")
    return ", ".join(parts)


def _unchecked(found: Measurement) -> str:
    return f"unchecked: {', '.join(found.unchecked)}" if found.unchecked else ""


def _reason(found: Measurement) -> str:
    if not found.valid:
        return f"void: {found.reason}"
    return "limited by the server's API process" if found.limited_by == "api_server" else ""
