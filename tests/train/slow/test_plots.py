"""The pictures of a training run: their numbers, that they are real PNG files, and their errors."""

import itertools

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from moe_jax.train.plots import moving_average, plot_expert_load, plot_loss, plot_run, relative_load


def test_moving_average_is_the_mean_of_the_last_values(rng):
    values = rng.normal(size=37)
    for width in (1, 5, 100):
        expected = [values[max(0, i + 1 - width) : i + 1].mean() for i in range(37)]
        np.testing.assert_allclose(moving_average(values, width), expected, rtol=1e-12, atol=1e-12)


def test_relative_load_is_one_for_even_and_empty_loads(rng):
    loads = rng.integers(1, 100, (3, 2, 8))
    loads[1, 0] = 0
    loads[2, 1] = 7
    relative = relative_load(loads)
    np.testing.assert_allclose(relative.mean(axis=-1), 1, rtol=1e-12)
    assert (relative[1, 0] == 1).all() and (relative[2, 1] == 1).all()
    np.testing.assert_allclose(relative[0, 0] * loads[0, 0].mean(), loads[0, 0])


def test_pictures_are_written_whole_and_differ_with_their_data(tmp_path, rng):
    steps = list(range(1, 41))
    first, second = (rng.gamma(2, size=40).tolist() for _ in range(2))
    plot_loss(steps, first, tmp_path / "deep" / "loss.png", resumed_at=20)
    before = matplotlib.image.imread(tmp_path / "deep" / "loss.png")
    plot_loss(steps, second, tmp_path / "deep" / "loss.png", resumed_at=20)
    after = matplotlib.image.imread(tmp_path / "deep" / "loss.png")
    assert before.shape == after.shape and (before != after).any()

    loads = rng.integers(0, 50, (40, 3, 16))
    plot_expert_load(steps, loads, [0, 2, 4], tmp_path / "load.png")
    assert matplotlib.image.imread(tmp_path / "load.png").std() > 0
    end = matplotlib.image.imread(tmp_path / "load.png")
    plot_expert_load(steps, loads, [0, 2, 4], tmp_path / "load.png", step=7)
    assert (matplotlib.image.imread(tmp_path / "load.png") != end).any()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deep", "load.png", "loss.png"]


def test_one_step_and_one_layer_are_enough(tmp_path):
    plot_loss([1], [3.0], tmp_path / "loss.png")
    plot_expert_load([1], np.ones((1, 1, 4), int), [0], tmp_path / "load.png")
    assert (tmp_path / "loss.png").stat().st_size > 0 and (tmp_path / "load.png").stat().st_size > 0


@pytest.mark.parametrize("layers", [1, 2, 8, 48])
def test_nothing_is_cut_at_the_edge_or_overlaps(layers, tmp_path, rng, monkeypatch):
    drawn = []
    monkeypatch.setattr("moe_jax.train.plots.save_png", lambda figure, _: drawn.append(figure))
    plot_expert_load(range(1, 41), rng.integers(1, 99, (40, layers, 8)), range(layers), tmp_path / "load.png")
    (figure,) = drawn
    FigureCanvasAgg(figure).draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    width, height = figure.bbox.size
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_bad_shapes_are_named_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="got 2 and 1"):
        plot_loss([1, 2], [3.0], tmp_path / "loss.png")
    with pytest.raises(ValueError, match="got 0 and 0"):
        plot_loss([], [], tmp_path / "loss.png")
    with pytest.raises(ValueError, match=r"\(5, 2, any\).*got \(5, 3, 8\)"):
        plot_expert_load(range(5), np.ones((5, 3, 8), int), [0, 1], tmp_path / "load.png")
    with pytest.raises(ValueError, match=r"got \(0, 2, 8\)"):
        plot_expert_load([], np.ones((0, 2, 8), int), [0, 1], tmp_path / "load.png")
    with pytest.raises(ValueError, match="step 9 is none of the 2 steps from 3 to 5"):
        plot_expert_load([3, 5], np.ones((2, 1, 4), int), [0], tmp_path / "load.png", step=9)
    with pytest.raises(FileNotFoundError, match="no metrics.jsonl with a step"):
        plot_run(tmp_path)
    assert not list(tmp_path.iterdir())
