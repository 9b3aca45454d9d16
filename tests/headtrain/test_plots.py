"""Figures are PNGs of the size asked for, in both themes, whatever the report holds."""

import struct

import pytest

from headtrain.plots import DARK, LIGHT, figure, line_plot, report_plots, write_plots


def make_set(name, shares=(0.7, 0.5)):
    return {
        "name": name,
        "prompts": 2,
        "new_tokens": 40,
        "acceptance_length": 1.9,
        "acceptance_by_depth": list(shares),
        "tokens_per_second": 20.0,
        "baseline": {"engine": 15.0, "transformers": 14.0},
        "speedup": {"engine": 1.33, "transformers": 1.43},
        "step_ms": {"draft": 10.0, "verify": 70.0, "other": 0.2},
        "parity": {"compared": 2, "identical": 1, "near_ties": 1, "mismatches": 0, "widest_gap": 0.125},
    }


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("count", [1, 12])
def test_report_plots(count, tmp_path):
    plots = report_plots({"sets": [make_set(f"set {i}") for i in range(count)]})
    assert list(plots) == ["acceptance_by_depth", "speedup_by_set", "step_time"]
    for draw, height in plots.values():
        light, dark = figure(draw, LIGHT, height), figure(draw, DARK, height)
        assert size(light) == size(dark) == (int(4.8 * 190), int(height * 190)) and light != dark
    assert [path.name for path in write_plots(plots, tmp_path)] == [f"{name}.png" for name in plots]


def test_nothing_accepted_has_no_depths():
    assert "acceptance_by_depth" not in report_plots({"sets": [make_set("a", ())]})


@pytest.mark.parametrize("xs", [[1, 2, 4, 8], [0.0, 0.7, 1.0], ["gumbel", "rejection"], [3]])
def test_line_plot(xs):
    draw, height = line_plot(
        {"with the head": [(x, 2.0) for x in xs], "plain": [(x, 1.0) for x in xs]}, "x", "y", "t", 1.0
    )
    size(figure(draw, DARK, height))
