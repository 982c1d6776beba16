"""Streams: budgets, every row once per pass, and training that resumes exactly."""

import itertools
import json
import os
import shutil
from logging import FileHandler
from types import SimpleNamespace

import pytest
from datasets.distributed import split_dataset_by_node
from forks import forked
from launches import TRAIN
from num2words import num2words
from test_batching import Recorder, assert_bit_for_bit, make_trainer, training_data, weights
from test_processes import assert_equal_weights
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from vaswani.commands.train import make_parser
from vaswani.corpora import streaming
from vaswani.corpora.corpus import Corpus, parse_corpora
from vaswani.corpora.filtering import Rules
from vaswani.corpora.mapped import MappedPairs
from vaswani.corpora.mixing import Mixture
from vaswani.corpora.preparing import prepare
from vaswani.corpora.reading import DataError
from vaswani.corpora.streaming import TokenBatchStream, rows_of_process
from vaswani.corpora.text_stream import TextStream
from vaswani.corpora.token_batches import PackedBatchSampler, TokenBatchSampler
from vaswani.training.token_batch_trainer import data_parallel_rank

from vaswani import VaswaniTokenizer

PAIRS = [(num2words(n), num2words(n, lang="de")) for n in range(120)]


@pytest.fixture(scope="module")
def tokenizer():
    lines = [text for pair in PAIRS for text in pair]
    return VaswaniTokenizer.train_from_iterator(lines, "char", 200, show_progress=False)


@pytest.fixture
def corpora(tmp_path):
    for part in range(4):
        rows = [f"{one}\t{two}\n" for one, two in PAIRS[30 * part :][:30]]
        (tmp_path / f"part-{part}.tsv").write_text("".join(rows), encoding="utf-8")
    return parse_corpora([f"{tmp_path}/part-*.tsv"])


class Rows(IterableDataset):
    def __iter__(self):
        yield from training_data()


def stream_of(data, process=0, processes=1, **options):
    options = {"max_source_tokens": 100, "max_target_tokens": 120, "buffer": 25, **options}
    return TokenBatchStream(
        rows_of_process(data, process, processes), collate=list, encode=data.encode, **options
    )


def taken(stream, count, workers=0):
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    return list(itertools.islice(loader, count))


def texts_of(batches, tokenizer):
    rows = [row["input_ids"] for batch in batches for row in batch]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_a_pass_has_every_pair_once_in_batches_within_the_budget(processes, corpora, tokenizer):
    data = TextStream(corpora, tokenizer, tokenizer, Rules(), seed=0)
    found = []
    for process in range(processes):
        stream = stream_of(data, process, processes)
        batches = [
            batch for batch, (_, state) in itertools.takewhile(
                lambda item: item[1][1]["pass"] == 0, stream
            )
        ]  # fmt: skip
        for batch in batches:
            assert max(len(row["input_ids"]) for row in batch) * len(batch) <= 100
            assert max(len(row["labels"]) for row in batch) * len(batch) <= 120
        found += texts_of(batches, tokenizer)
    assert sorted(found) == sorted(source for source, _ in PAIRS)


@pytest.mark.parametrize("weights", ["", "=2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_continues_from_a_state_with_the_batches_that_it_would_have_had(
    workers, weights, corpora, tokenizer, tmp_path
):
    if weights:
        words = [f"{tmp_path}/part-[01].tsv{weights}", f"{tmp_path}/part-[23].tsv"]
        corpora = parse_corpora(words)
    data = TextStream(corpora, tokenizer, tokenizer, Rules(), seed=0)
    whole = taken(stream_of(data), 60, workers)
    assert {state["pass"] for _, (_, state) in whole} >= {0, 1}
    for stop in (1, 7, 29, 41):
        states = {}
        for _, (worker, state) in whole[:stop]:
            states[worker] = json.loads(json.dumps(state))
        continued = taken(stream_of(data, states=states), 60, workers)
        assert [batch for batch, _ in continued[:stop]] == [None] * stop
        assert continued[stop:] == whole[stop:]


def test_weights_are_the_shares_of_a_stream(corpora, tokenizer, tmp_path):
    for name, word in (("a", "one"), ("b", "two")):
        (tmp_path / f"{name}.tsv").write_text(f"{word}\t{word}\n" * 300)
    mixed = parse_corpora([f"{tmp_path}/a.tsv=3", f"{tmp_path}/b.tsv"])
    data = TextStream(mixed, tokenizer, tokenizer, Rules(), seed=0)
    texts = texts_of([batch for batch, _ in taken(stream_of(data), 15)], tokenizer)
    assert 0.6 < texts.count("one") / len(texts) < 0.9


def test_a_corpus_without_weight_or_without_pairs_does_not_hold_up_a_stream(tokenizer, tmp_path):
    (tmp_path / "a.tsv").write_text("one\tone\n" * 5)
    (tmp_path / "b.tsv").write_text("two\ttwo\n")
    (tmp_path / "c.tsv").write_text("")
    words = [f"{tmp_path}/a.tsv", f"{tmp_path}/b.tsv=0", f"{tmp_path}/c.tsv"]
    data = TextStream(parse_corpora(words), tokenizer, tokenizer, Rules(), seed=0)
    rows = [row["source"] for row in data.rows_of_process(0, 1)]
    assert set(rows) == {"one"}
    assert len(rows) >= 5


def test_a_line_that_cannot_be_read_ends_a_stream_with_its_place(tokenizer, tmp_path):
    (tmp_path / "a.tsv").write_text("one\teins\nno tab\n")
    corpora = parse_corpora([f"{tmp_path}/a.tsv"])
    with pytest.raises(DataError, match=r"a\.tsv, line 2: no tab"):
        taken(stream_of(TextStream(corpora, tokenizer, tokenizer, Rules(), seed=0)), 1)
    skipping = TextStream(corpora, tokenizer, tokenizer, Rules(skip_unreadable=True), seed=0)
    ((batch, _),) = taken(stream_of(skipping), 1)
    assert texts_of([batch], tokenizer) == ["one"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_dropped_pairs_alone_ends_with_an_error(workers, corpora, tokenizer):
    data = TextStream(corpora, tokenizer, tokenizer, Rules(max_length=1), seed=0)
    share = 120 // max(workers, 1)
    with pytest.raises(DataError, match=rf"All {share} pairs of the stream were dropped"):
        taken(stream_of(data), 1, workers)


FORMS = {
    "iterable of torch": Rows,
    "iterable of datasets": lambda: training_data().to_iterable_dataset(num_shards=3),
    "shuffled": lambda: (
        training_data().to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=20)
    ),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_training_on_a_stream_resumes_with_the_same_weights(form, workers, tmp_path):
    changes = {
        "save_strategy": "steps", "save_steps": 5, "max_steps": 13, "stream_buffer": 16,
        "dataloader_num_workers": workers, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    whole = make_trainer(tmp_path / "whole", data=FORMS[form](), **changes)
    whole.train()
    resumed = make_trainer(tmp_path / "whole", data=FORMS[form](), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert resumed.state.global_step == 13
    for name, value in whole.model.state_dict().items():
        assert (resumed.model.state_dict()[name] == value).all(), name
    changes["dataloader_num_workers"] = 3
    other = make_trainer(tmp_path / "whole", data=FORMS[form](), **changes)
    with pytest.raises(ValueError, match=r"streams of \d loader workers, but this run has 3"):
        other.train(resume_from_checkpoint=True)


class RowsOfWorker(IterableDataset):
    """Rows that are divided among workers, as the documentation of PyTorch shows."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from itertools.islice(PAIRS, worker, None, workers)


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("processes", [1, 2])
def test_rows_that_divide_themselves_among_workers_are_all_read(processes, workers):
    read = [
        tuple(row)
        for process in range(processes)
        for row in DataLoader(
            Read(rows_of_process(RowsOfWorker(), process, processes)),
            batch_size=None,
            num_workers=workers,
        )
    ]
    assert sorted(read) == sorted(PAIRS)


class Read(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def test_data_that_were_divided_before_are_refused():
    data = training_data().to_iterable_dataset(num_shards=4)
    with pytest.raises(DataError, match="pass the whole data set"):
        rows_of_process(split_dataset_by_node(data, 0, 2), 0, 2)
    assert len(list(rows_of_process(split_dataset_by_node(data, 0, 1), 0, 1))) == len(list(data))


def test_a_stream_continues_with_the_settings_of_its_checkpoint(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "stream_buffer": 16}
    make_trainer(tmp_path, data=Rows(), **changes).train()
    for name, value in (("stream_buffer", 8), ("max_source_tokens", 50), ("drop_oversize", True)):
        resumed = make_trainer(tmp_path, data=Rows(), **changes | {"max_steps": 4, name: value})
        with pytest.raises(ValueError, match=f"was saved with {name}=.*, but this run has {value}"):
            resumed.train(resume_from_checkpoint=True)
    budget = {"max_target_tokens": resumed.max_source_tokens}  # the default
    resumed = make_trainer(tmp_path, data=Rows(), **changes | {"max_steps": 3} | budget)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_rows_or_columns_ends_with_an_error(workers, tmp_path):
    class Given(IterableDataset):
        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            return iter(self.rows)

    changes = {"max_steps": 2, "dataloader_num_workers": workers}
    with pytest.raises(ValueError, match=r"have no rows|gave no batch"):
        make_trainer(tmp_path, data=Given([]), **changes).train()
    with pytest.raises(ValueError, match="no 'input_ids', only src: tokenize the rows"):
        make_trainer(tmp_path, data=Given([{"src": "a"}] * 4), **changes).train()
    row = {"input_ids": [5, 2], "labels": [6, 2]}
    for labels, complaint in ((None, "no 'labels'"), ([], "no tokens in 'labels'"), (1, "1 as 'l")):
        rows = [row, {**row, "labels": labels}] * 2
        with pytest.raises(ValueError, match=complaint):
            make_trainer(tmp_path, data=Given(rows), **changes).train()


def test_streams_and_data_with_a_length_do_not_continue_each_other(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    for name, first, other, complaint in (
        ("data", training_data(), Rows(), "was not saved by a run on a stream"),
        ("stream", Rows(), training_data(), "was saved by a run on a stream"),
    ):
        make_trainer(tmp_path / name, data=first, **changes).train()
        resumed = make_trainer(tmp_path / name, data=other, **changes | {"max_steps": 4})
        with pytest.raises(ValueError, match=f"checkpoint-2 {complaint}"):
            resumed.train(resume_from_checkpoint=True)


SMALL = ["d_model=16", "encoder_layers=1", "decoder_layers=1", "encoder_attention_heads=2"]
SMALL += ["decoder_attention_heads=2", "encoder_ffn_dim=16", "decoder_ffn_dim=16"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_in_several_processes_resumes_with_the_same_weights(
    processes, corpora, tokenizer, tmp_path
):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [
        *TRAIN, "--train", f"{tmp_path}/part-*.tsv", "--stream", "--stream-buffer", "20",
        "--tokenizer", tmp_path / "tokenizer", "--max-source-tokens", "150", "--save-steps", "4",
        "--warmup", "5", "--set", *SMALL,
    ]  # fmt: skip
    forked(processes, *words, "--steps", 9, "--output", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "resumed" / "checkpoint-4")
    forked(processes, *words, "--steps", 9, "--output", tmp_path / "resumed", "--resume")
    assert_equal_weights(tmp_path / "whole", tmp_path / "resumed", 0)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--stream needs --max-source-tokens"),
        (["--max-source-tokens", "9", "--epochs", "2"], "--stream needs --steps"),
        (["--max-source-tokens", "9"], "--stream needs --tokenizer or --model"),
        (
            ["--max-source-tokens", "9", "--tokenizer", "t", "--drop-duplicates", "pairs"],
            "--drop-duplicates needs prepared data",
        ),
    ],
)
def test_a_stream_without_what_it_needs_is_refused(words, complaint, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--train", "a.tsv", "--output", "x", "--stream", *words])
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "rules",
    [
        {"drop_empty": True},
        {"drop_identical": True},
        {"scripts": ("Han", "Han")},
        {"function": "operator:ne"},
    ],
)
def test_filters_of_a_stream_see_the_texts_without_their_tags(rules, tokenizer, tmp_path):
    rows = ["\tleer", "eins\teins", "one\teins", "日\t日", "月\t日"]
    (tmp_path / "a.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    corpora = parse_corpora([f"{tmp_path}/a.tsv"], tags=["de"])
    chosen = Rules(**rules)
    streamed = list(TextStream(corpora, tokenizer, tokenizer, chosen, seed=0))
    found = prepare(corpora[0], tokenizer, tokenizer, chosen, tmp_path, processes=1)
    prepared = MappedPairs.from_files(found.files, "name")[:]
    for name in ("input_ids", "labels"):
        assert [row[name] for row in streamed] == prepared[name]
    assert 0 < len(streamed) < len(rows)


def test_each_row_of_a_stream_gets_the_tag_of_its_corpus(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_text(f"{name}\tx\n" * 3)
    words = [f"{tmp_path}/a.tsv=1", f"{tmp_path}/b.tsv=1"]
    lines = [">>de<< a", ">>fr<< b"]
    tokenizer = VaswaniTokenizer.train_from_iterator(lines, "char", 50, show_progress=False)
    corpora = parse_corpora(words, tags=["de", "fr"])
    data = TextStream(corpora, tokenizer, tokenizer, Rules(), seed=0)
    found = {tuple(row["input_ids"]) for row in data}
    assert found == {tuple(tokenizer(line)["input_ids"]) for line in lines}


def test_a_stream_refuses_what_can_be_read_only_once(tokenizer, tmp_path):
    os.mkfifo(tmp_path / "pipe.tsv")
    for names in ([str(tmp_path / "pipe.tsv")], ["-", str(tmp_path / "b.de")]):
        corpora = [Corpus((tuple(names),))]
        with pytest.raises(DataError, match=f"{names[0]} can be read only once: training data"):
            TextStream(corpora, tokenizer, tokenizer, Rules(), 1)


def test_a_stream_refuses_to_drop_duplicates(corpora, tokenizer):
    with pytest.raises(DataError, match="drop_duplicates needs prepared data, because"):
        TextStream(corpora, tokenizer, tokenizer, Rules(drop_duplicates="pairs"), seed=0)


SAVING = {"save_strategy": "steps", "save_steps": 1, "stream_buffer": 16}


def test_a_second_training_starts_its_stream_again(tmp_path):
    record = Recorder()
    trainer = make_trainer(tmp_path, data=Rows(), collate=record, stream_buffer=16, max_steps=3)
    trainer.train()
    first, record.batches = record.batches, []
    trainer.train()
    assert record.batches == first


def test_a_stream_continues_at_its_position_even_with_ignore_data_skip(tmp_path):
    # transformers restores the random numbers of dropout only if it skips batches itself.
    changes = {"max_steps": 3, "dropout": 0.0, **SAVING}
    whole = make_trainer(tmp_path, data=Rows(), **changes)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", data=Rows(), ignore_data_skip=True, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 3
    assert_bit_for_bit(weights(resumed), weights(whole))
    # The states also count the batches that were skipped, for the next resume.
    for folder in (tmp_path, tmp_path / "resumed"):
        saved = json.loads((folder / "checkpoint-3" / "stream_state_0.json").read_text())
        assert saved["states"]["0"]["total"] == 3


class AtSigterm(TrainerCallback):
    """Ask for transformers' checkpoint on SIGTERM at an event, after a number of updates."""

    def __init__(self, event, updates):
        self.manager, self.updates = None, updates
        setattr(self, event, self.request)

    def request(self, args, state, control, **kwargs):
        if state.global_step == self.updates:
            self.manager.is_checkpoint_requested = True


@pytest.mark.parametrize(
    ("event", "updates"),
    [
        ("on_step_begin", 0),
        ("on_step_begin", 2),
        ("on_pre_optimizer_step", 0),
        ("on_pre_optimizer_step", 2),
        ("on_step_end", 2),
    ],
)
def test_a_checkpoint_on_sigterm_continues_a_stream(event, updates, tmp_path):
    changes = {
        "max_steps": 4, "dropout": 0.0, "gradient_accumulation_steps": 2,
        "save_strategy": "no", "enable_jit_checkpoint": True,
    }  # fmt: skip
    whole = make_trainer(tmp_path / "whole", data=Rows(), **changes)
    whole.train()
    stopped = make_trainer(tmp_path / "stopped", data=Rows(), **changes)
    terminate = AtSigterm(event, updates)
    callbacks = stopped.callback_handler.callbacks
    (on_sigterm,) = (one for one in callbacks if isinstance(one, JITCheckpointCallback))
    terminate.manager = on_sigterm.jit_manager
    callbacks.insert(0, terminate)
    stopped.train()
    resumed = make_trainer(tmp_path / "stopped", data=Rows(), **changes)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_bit_for_bit(weights(resumed), weights(whole))


def test_a_checkpoint_before_the_first_batch_of_some_workers_resumes(tmp_path):
    def trainer_of(output):
        data = training_data().to_iterable_dataset(num_shards=2)  # the third worker has none
        changes = {"max_steps": 2, "dataloader_num_workers": 3, **SAVING}
        return make_trainer(output, data=data, **changes)

    whole = trainer_of(tmp_path)
    whole.train()
    resumed = trainer_of(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_bit_for_bit(weights(resumed), weights(whole))


LONG = [{"input_ids": [3] * length, "labels": [4] * 5} for length in (5, 50, 50, 5, 5, 60)]


def stream_of_rows(rows, **options):
    return TokenBatchStream(
        rows_of_process(rows, 0, 1), 10, 10, collate=list, **{"buffer": 2, **options}
    )


@pytest.mark.parametrize("batching", [TokenBatchSampler, PackedBatchSampler])
@pytest.mark.parametrize("drop", [False, True])
def test_oversize_pairs_of_a_stream_are_alone_or_dropped(drop, batching):
    stream = stream_of_rows(LONG, drop_oversize=drop, sampler=batching)
    batches = [
        [len(row["input_ids"]) for row in batch]
        for batch, (_, state) in itertools.islice(stream, 12)
        if state["pass"] == 0
    ]
    assert sorted(batches) == [[5]] * 3 + ([] if drop else [[50], [50], [60]])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("drop", "fate"), [(False, "alone in a batch"), (True, "dropped")])
def test_a_stream_warns_once_of_oversize_pairs_without_numbers_of_rows(
    drop, fate, workers, tmp_path
):
    handler = FileHandler(tmp_path / "log")  # workers append to the same file
    streaming.logger.addHandler(handler)
    try:
        taken(stream_of_rows(LONG, drop_oversize=drop), 12, workers)
    finally:
        streaming.logger.removeHandler(handler)
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert f"These pairs are {fate}. The first one has" in line
    assert "counted from 0" not in line


def test_a_stream_without_any_pair_in_the_budget_says_so():
    with pytest.raises(DataError, match="loosen the filters or raise the budgets of tokens"):
        taken(stream_of_rows(LONG[1:3], drop_oversize=True), 1)


def test_a_trainer_drops_oversize_pairs_of_a_stream(tmp_path):
    record = Recorder()
    changes = {"max_source_tokens": 10, "drop_oversize": True, "stream_buffer": 8, "max_steps": 6}
    data = training_data().to_iterable_dataset()
    make_trainer(tmp_path, data=data, collate=record, **changes).train()
    lengths = [pair for batch in record.batches for pair in batch]
    assert max(map(max, lengths)) <= 10


@pytest.mark.parametrize(
    ("streams", "changes", "complaint"),
    [
        (True, {"lengths": [(5, 5)] * 60}, "lengths needs .*: leave lengths out"),
        (True, {"mixture": Mixture([60], [1])}, "mixture needs .*weights .* of a TextStream"),
        (False, {"stream_buffer": 16}, "stream_buffer=16 needs .*: leave stream_buffer out"),
        (False, {"max_source_tokens": None, "drop_oversize": True}, "drop_oversize needs max_sour"),
        (
            False,
            {"max_source_tokens": None, "mixture": Mixture([60], [1])},
            "mixture needs max_source_tokens.*leave mixture out",
        ),
        (False, {"noam_factor": 2.0}, "noam_factor=2.0 needs noam_warmup_steps: give both"),
    ],
)
def test_arguments_without_effect_are_refused(streams, changes, complaint, tmp_path):
    data = training_data()
    with pytest.raises(ValueError, match=complaint):
        make_trainer(tmp_path, data=data.to_iterable_dataset() if streams else data, **changes)


def test_processes_of_a_tensor_parallel_group_read_the_same_rows(tmp_path, monkeypatch):
    assert [data_parallel_rank(process, 6, 1) for process in (0, 5)] == [(0, 6), (5, 6)]
    assert [data_parallel_rank(process, 6, 2)[0] for process in range(6)] == [0, 0, 1, 1, 2, 2]
    assert data_parallel_rank(5, 6, 3) == (1, 2)

    def rows_of(process):
        trainer = make_trainer(tmp_path, data=Rows())
        monkeypatch.setattr(type(trainer.args), "process_index", process)
        trainer.accelerator = SimpleNamespace(num_processes=4)
        trainer.get_tp_size = lambda: 2
        return list(trainer.get_train_dataloader().dataset.rows)

    first, second, third, fourth = map(rows_of, range(4))
    assert first == second
    assert third == fourth
    assert [*first, *third] == [*training_data()][::2] + [*training_data()][1::2]


def test_an_update_has_one_batch_per_tensor_parallel_group(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=3)
    trainer.accelerator = SimpleNamespace(num_processes=4)
    trainer.get_tp_size = lambda: 2
    assert trainer._token_batch_sampler(96).batches_per_update == 6


def test_a_buffer_without_a_stream_is_refused(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--train", "a.tsv", "--output", "x", "--stream-buffer", "9"])
    assert "--stream-buffer needs --stream" in capsys.readouterr().err


def test_a_stream_refuses_a_resume_with_other_accumulation(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_source_tokens": 60}
    run = make_trainer(tmp_path, data=Rows(), max_steps=2, **saving)
    run.train()
    changed = make_trainer(
        tmp_path, data=Rows(), max_steps=4, gradient_accumulation_steps=2, **saving
    )
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=1, but this run has 2"):
        changed.train(resume_from_checkpoint=True)


def test_rows_with_an_open_file_can_be_streamed(tmp_path):
    class FromFile(Rows):
        def __init__(self):
            self.file = open(__file__)  # noqa: SIM115

    run = make_trainer(tmp_path, data=FromFile(), max_steps=1, max_source_tokens=60)
    run.train()
    run.train_dataset.file.close()
    assert run.state.global_step == 1
