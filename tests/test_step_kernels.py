"""The choice of tokens and hypotheses, and the inputs of a step, in compiled kernels."""

import functools
import math

import pytest
import torch
from vaswani.generation import beam_vaswani, continuations_vaswani
from vaswani.generation.choice_vaswani import best_candidates, best_tokens, end_sentences
from vaswani.generation.compiled_vaswani import CompiledEmbedding
from vaswani.generation.continuations_vaswani import best_continuations
from vaswani.generation.int8_vaswani import Int8Embedding
from vaswani.generation.library_vaswani import library
from vaswani.generation.rules_vaswani import SearchSettings
from vaswani.generation.structures_vaswani import Positions, descend

compiled = pytest.mark.skipif(library() is None, reason="this machine compiles no kernels")
BLOCK = 16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def log_sums_of(logits):
    """Give the first token of each row (R, V) the logit 0, whose score is minus the log-sum-exp."""
    logits[:, 0] = 0
    rows, vocabulary = logits.shape
    scores, _, tokens = best_candidates(logits, BLOCK, torch.zeros(rows, 1), vocabulary)
    place = (scores > -torch.inf) & (tokens == 0)  # missing candidates have the token 0 too
    assert (place.sum(dim=1) == 1).all()
    return -scores[place]


@compiled
class TestChoice:
    """Log-probabilities, and the best continuations."""

    @pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 64, 1003])
    def test_scores_are_log_probabilities(self, vocabulary, with_threads):
        logits = 20 * torch.randn(7, vocabulary)
        logits[:, vocabulary // 2 + 1 :: 3] = -torch.inf
        log_sums = log_sums_of(logits)
        expected = logits.double().logsumexp(dim=1)
        torch.testing.assert_close(log_sums.double(), expected, rtol=1e-6, atol=1e-6)
        for count in {1, min(3, vocabulary), vocabulary}:
            find = functools.partial(best_candidates, logits, BLOCK, torch.zeros(7, 1), count)
            best = (logits - log_sums[:, None]).topk(count).values
            for number in (1, 2):
                assert torch.equal(with_threads(number, find)[0], best)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("place", [0, 31, 40, slice(16, 32), slice(None)])
    def test_the_best_of_a_sentence_is_nan_if_a_logit_is_nan_or_infinite(self, place, value):
        logits = torch.randn(6, 41)
        logits[4, place] = value
        scores, *_ = best_candidates(logits, BLOCK, torch.zeros(2, 3), 8)
        assert scores[0].isfinite().all()
        assert scores[1, 0].isnan()

    def test_the_best_of_a_sentence_is_nan_if_a_hypothesis_has_no_possible_token(self):
        logits = torch.randn(6, 41)
        logits[4] = -torch.inf
        scores, *_ = best_candidates(logits, BLOCK, torch.zeros(2, 3), 8)
        assert scores[:, 0].isnan().tolist() == [False, True]

    @pytest.mark.parametrize("count", [1, 2, 8, 40])
    @pytest.mark.parametrize("vocabulary", [64, 1003])
    @pytest.mark.parametrize("shuffled", [False, True])
    @pytest.mark.parametrize("banned", [[], [3], [0, 1, 17, 63]])
    def test_the_best_are_those_of_a_sort(self, count, vocabulary, shuffled, banned):
        logits, running = torch.randn(12, vocabulary), torch.randn(3, 4)
        rows = torch.randperm(12) if shuffled else torch.arange(12)
        offsets = running.flatten()[rows] - log_sums_of(logits)
        scores = logits + offsets[:, None]
        scores[:, banned] = -torch.inf
        scores, places = scores[rows.argsort()].view(3, -1).topk(count)
        found = best_candidates(
            logits, BLOCK, running, count, rows if shuffled else None, torch.tensor(banned).long()
        )
        assert torch.equal(found[0], scores)
        assert torch.equal(found[1], places // vocabulary)
        assert torch.equal(found[2], places % vocabulary)

    def test_more_candidates_than_a_kernel_has_room_for_are_found_by_torch(self, monkeypatch):
        logits, running = torch.randn(6, 2000), torch.randn(2, 3)
        found = best_continuations(logits, running, 4)
        monkeypatch.setattr(continuations_vaswani, "_ON_STACK", 3)
        monkeypatch.setattr(continuations_vaswani, "best_candidates", None)  # is not called
        scores, hypotheses, tokens = best_continuations(logits, running, 4)
        torch.testing.assert_close(scores, found[0])
        assert torch.equal(hypotheses, found[1])
        assert torch.equal(tokens, found[2])

    def test_the_best_token_is_the_first_of_equal_ones_and_nan_is_best_as_in_torch(self):
        logits = torch.randint(0, 5, (9, 1003)).float()
        logits[3] = -torch.inf
        logits[4, 700] = torch.inf
        logits[5, [702, 1001]] = torch.nan
        logits[6, [1002, 3]] = torch.tensor([torch.nan, torch.inf])
        assert torch.equal(best_tokens(logits), logits.argmax(dim=1))

    def test_equal_scores_are_found_once_each(self):
        running = torch.full((1, 2), math.log(64))
        scores, hypotheses, tokens = best_candidates(torch.zeros(2, 64), BLOCK, running, 8)
        assert torch.equal(scores, torch.zeros(1, 8))
        assert len(set(zip(hypotheses[0].tolist(), tokens[0].tolist(), strict=True))) == 8

    def test_hypotheses_without_continuations_have_none(self):
        logits = torch.randn(1, 64)
        expected = (logits - log_sums_of(logits)).sort(descending=True).values[0]
        rows = torch.tensor([3])
        scores, hypotheses, _ = best_candidates(logits, BLOCK, torch.zeros(2, 2), 80, rows)
        assert (scores[0] == -torch.inf).all()
        assert (hypotheses[1, :64] == 1).all()
        assert torch.equal(scores[1, :64], expected)
        assert (scores[1, 64:] == -torch.inf).all()

    def test_positions_are_those_where_a_mask_is_zero(self):
        mask = torch.full((3, 9), -torch.inf)
        mask[0, 2] = mask[0, 8] = mask[2, 0] = 0
        positions = Positions()
        positions.see(mask)
        assert positions.counts.tolist() == [2, 0, 1]
        assert positions.places[:2].tolist() == [2, 8]
        assert positions.places[2 * 9] == 0
        positions.see(mask, end=8)
        assert positions.counts.tolist() == [1, 0, 1]
        assert positions.places[2 * 8] == 0
        listed = positions.listed(hypotheses=12)
        assert (listed.longest, listed.hypotheses_per_list) == (8, 4)


@compiled
class TestBeam:
    """A step of the beam search, against torch's operators."""

    @pytest.mark.parametrize("early_stopping", ["never", False, True])
    @pytest.mark.parametrize("penalty", [(0.6, "gnmt"), (1.0, None), (-1.0, None), (0.0, None)])
    @pytest.mark.parametrize("returned", [1, 3])
    def test_steps_equal_those_of_torch(self, early_stopping, penalty, returned, monkeypatch):
        settings = SearchSettings(3, returned, *penalty, early_stopping, eos_token_ids=(2, 5))
        limits = torch.tensor([4, 9, 1, 6, 30])
        beams = [beam_vaswani.Beam.start(limits, settings, torch.empty(0)) for _ in range(2)]
        for length in range(1, 12):
            shape = len(beams[0].rows), 9
            candidates = beam_vaswani.Candidates(
                torch.randn(shape).sub(length).sort(descending=True).values,
                torch.randint(0, 3, shape),
                torch.randint(0, 9, shape),
            )
            monkeypatch.undo()
            found = beams[0].advance(candidates, length, settings)
            monkeypatch.setattr(beam_vaswani, "can_compute", lambda *tensors: False)
            expected = beams[1].advance(candidates, length, settings)
            assert (found[2] is None) == (early_stopping != "never")
            for name in ("done", "finished", "leaving"):
                torch.testing.assert_close(*(getattr(beam, name) for beam in beams), rtol=0, atol=0)
            # Scores that are ruled out are all equal, and nothing reads endings without a score.
            goes_on = beams[0].running > -1e8
            for ours, theirs in zip(
                (*found[:2], beams[0].running), (*expected[:2], beams[1].running), strict=True
            ):
                assert torch.equal(ours[goes_on], theirs[goes_on])
            has_ended = beams[0].finished > -torch.inf
            assert torch.equal(beams[0].endings[has_ended], beams[1].endings[has_ended])
            assert torch.equal(beams[0].endings[..., 0] > 0, has_ended)
            if found[2] is not None:
                assert torch.equal(found[2], expected[2])
            kept = (~beams[0].done).nonzero()[:, 0]
            assert beams[0].leaving == shape[0] - len(kept)
            if length % 3 == 0:  # between, some sentences are done and still there
                for beam in beams:
                    beam.keep(kept)
        assert len(beams[0].rows) < len(limits)

    def test_impossible_candidates_finish_nothing_and_scores_of_nan_are_an_error(self):
        settings = SearchSettings(2, early_stopping="never", eos_token_ids=(0,))
        beam = beam_vaswani.Beam.start(torch.tensor([3]), settings, torch.empty(0))
        zeros = torch.zeros(1, 4, dtype=torch.long)
        candidates = beam_vaswani.Candidates(torch.full((1, 4), -torch.inf), zeros, zeros)
        _, _, rows = beam.advance(candidates, 1, settings)
        assert len(rows) == 0
        assert (beam.endings == 0).all()
        assert (beam.running == -torch.inf).all()
        assert beam.done.all()
        candidates.scores[0, 0] = torch.nan
        with pytest.raises(ValueError, match="scores are NaN"):
            beam.advance(candidates, 2, settings)

    def test_sentences_end_at_end_tokens_and_at_limits(self):
        tokens, limits = torch.tensor([2, 7, 5, 8, 8]), torch.tensor([9, 9, 9, 3, 4])
        before = torch.tensor([False, False, False, False, True])
        ends = SearchSettings(eos_token_ids=(2, 5))
        done, count = end_sentences(tokens, limits, before, ends.end_array, 3)
        assert done.tolist() == [True, False, True, True, True]
        assert count == 4
        assert before.sum() == 1
        assert end_sentences(tokens, limits, before, SearchSettings().end_array, 1)[1] == 1

    def test_hypotheses_see_what_their_parents_saw_and_themselves(self):
        mask = torch.where(torch.rand(2, 3, 10) > 0.5, 0, -torch.inf)
        mask[:, :, 6:] = -torch.inf
        parents = torch.tensor([[2, 0, 0], [1, 1, 2]])
        expected = torch.stack([row[parent] for row, parent in zip(mask, parents, strict=True)])
        expected[:, [0, 1, 2], [6, 7, 8]] = 0
        output = torch.empty_like(mask)
        assert descend(mask, parents, 6, output) is output
        assert torch.equal(output, expected)


@compiled
class TestEmbedding:
    """Embeddings of one position."""

    @pytest.mark.parametrize("kind", ["float32", "int8"])
    @pytest.mark.parametrize("rows", [None, [5, 0, 2]])
    def test_they_are_those_of_torch(self, kind, rows):
        embedding = torch.nn.Embedding(50, 24)
        if kind == "int8":
            embedding = Int8Embedding(embedding, {})
        tokens, position = torch.randint(0, 50, (2, 3)), torch.randn(24)
        rows = None if rows is None else torch.tensor(rows)
        with torch.inference_mode():
            states = CompiledEmbedding.prepare(embedding, 4.9)(tokens, rows, position)
            chosen = tokens.flatten() if rows is None else tokens.flatten()[rows]
            assert torch.equal(states, embedding(chosen) * 4.9 + position)

    def test_a_token_without_an_entry_is_left_to_torch(self):
        embedding = CompiledEmbedding.prepare(torch.nn.Embedding(50, 24), 1.0)
        for token in (50, -1):
            assert embedding(torch.tensor([[3, token]]), None, torch.zeros(24)) is None

    def test_entries_of_another_width_are_left_to_torch(self):
        embedding = CompiledEmbedding.prepare(torch.nn.Embedding(50, 24), 1.0)
        assert embedding(torch.tensor([[3]]), None, torch.zeros(16)) is None

    @pytest.mark.parametrize("count", [1, 10])
    def test_missing_scales_are_left_to_torch(self, count):
        embedding = Int8Embedding(torch.nn.Embedding(50, 24), {})
        embedding.weight_scale.data = embedding.weight_scale.data[:count].clone()
        assert CompiledEmbedding.prepare(embedding, 1.0) is None

    def test_a_position_may_be_a_view_of_negative_values(self):
        table, position = torch.nn.Embedding(50, 24), torch.randn(24)
        embedding, token = CompiledEmbedding.prepare(table, 1.0), torch.tensor([[3]])
        states = embedding(token, None, torch._neg_view(position))
        assert torch.equal(states, table.weight[3:4] - position)

    def test_other_embeddings_are_left_to_torch(self):
        class Other(torch.nn.Embedding):
            pass

        hooked = torch.nn.Embedding(4, 8)
        hooked.register_forward_hook(lambda *_: None)
        for embedding in (Other(4, 8), hooked, torch.nn.Embedding(4, 8, dtype=torch.bfloat16)):
            assert CompiledEmbedding.prepare(embedding, 1.0) is None
