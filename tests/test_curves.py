"""The picture of the learning curve shows the values of the log."""

import matplotlib.image
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from test_batching import make_trainer, training_data
from transformers.testing_utils import CaptureLogger
from vaswani.training import curves
from vaswani.training.curves import LearningCurve, draw_learning_curve

LOG = [
    {"step": 10, "loss": 5.0, "learning_rate": 0.1},
    {"step": 10, "eval_loss": 4.5, "eval_bleu": 3.0, "eval_chrf": 20.0},
    {"step": 20, "loss": 4.0},
    {"step": 20, "eval_loss": 4.2, "eval_bleu": 9.0, "eval_chrf": 25.0},
    {"step": 20, "eval_loss": float("nan"), "eval_bleu": None, "eval_chrf": [25.0]},
    {"step": 20, "train_runtime": 3.0},
]


@pytest.fixture
def drawn(monkeypatch):
    """The plotted lines: the label and the points of each line."""
    lines, plot = {}, Axes.plot

    def spy(self, steps, values, **kwargs):
        lines[kwargs["label"]] = list(zip(steps, values, strict=True))
        return plot(self, steps, values, **kwargs)

    monkeypatch.setattr(Axes, "plot", spy)
    return lines


@pytest.mark.parametrize(("score", "points"), [("bleu", [3.0, 9.0]), ("chrf", [20.0, 25.0])])
def test_losses_and_score_are_drawn_at_their_updates(drawn, tmp_path, score, points):
    draw_learning_curve(LOG, tmp_path / "curve.png", score)
    assert drawn == {
        "training (smoothed, with dropout)": [(10, 5.0), (20, 4.0)],
        "validation": [(10, 4.5), (20, 4.2)],
        score: list(zip((10, 20), points, strict=True)),
    }
    height, width, _ = matplotlib.image.imread(tmp_path / "curve.png").shape
    assert width > height > 300


def test_the_last_values_of_the_validation_are_written(monkeypatch, tmp_path):
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **kwargs: figures.append(self) or savefig(self, *args, **kwargs),
    )
    draw_learning_curve(LOG, tmp_path / "curve.svg")
    losses, scores = figures[0].axes
    assert [text.get_text() for text in losses.texts] == ["4.2"]
    assert [text.get_text() for text in scores.texts] == ["9"]
    assert scores.get_ylabel() == "validation BLEU"
    right = losses.child_axes[0]
    assert right.get_ylabel() == "validation perplexity"
    for mark, text in zip(right.get_yticks(), right.get_yticklabels(), strict=True):
        assert float(text.get_text().replace(",", "")) == mark


def test_a_write_that_fails_leaves_the_curve_that_was_there(monkeypatch, tmp_path):
    draw_learning_curve(LOG[:1], tmp_path / "curve.png")
    before = (tmp_path / "curve.png").read_bytes()

    def fail(self, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        draw_learning_curve(LOG, tmp_path / "curve.png")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    assert (tmp_path / "curve.png").read_bytes() == before


def test_losses_of_a_diverging_run_are_drawn_without_perplexities(drawn, tmp_path):
    log = [{"step": 1, "loss": 1000.0}, {"step": 1, "eval_loss": 5.0}, {"step": 2, "loss": 900.0}]
    draw_learning_curve(log, tmp_path / "curve.png")
    assert drawn["validation"] == [(1, 5.0)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "log", [[], LOG[:1], LOG[5:], [{"step": 1, "loss": 0.0}], [{"step": 0, "loss": 1.0}]]
)
def test_a_log_of_little_makes_a_picture_of_little(drawn, tmp_path, log):
    draw_learning_curve(log, tmp_path / "curve.png")
    assert len(drawn) == sum("loss" in entry for entry in log)
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_training_run_leaves_its_picture_from_the_first_evaluation_on(drawn, tmp_path):
    trainer = make_trainer(
        tmp_path,
        callbacks=[LearningCurve()],
        max_steps=4,
        logging_strategy="steps",
        logging_steps=2,
    )
    trainer.eval_dataset = training_data(4)
    trainer.evaluate()
    assert list(drawn) == ["validation"]
    (tmp_path / "learning_curve.png").unlink()
    trainer.train()
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history[:2]]
    assert [step for step, _ in losses] == [2, 4]
    assert drawn["training (smoothed, with dropout)"] == losses
    assert (tmp_path / "learning_curve.png").exists()


def test_a_picture_that_cannot_be_written_does_not_end_training(tmp_path, monkeypatch):
    def no_space_left(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(curves, "draw_learning_curve", no_space_left)
    trainer = make_trainer(tmp_path, callbacks=[LearningCurve()], max_steps=2)
    with CaptureLogger(curves.logger) as log:
        trainer.train()
    assert trainer.state.global_step == 2
    assert f"{tmp_path / 'learning_curve.png'} could not be written: No space left" in log.out
