"""Every call of `generate` uses the weights that the model has when the call starts."""

import copy
import ctypes
import gc
import io
import itertools
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import multiprocessing, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim.swa_utils import AveragedModel
from transformers import CompileConfig, LogitsProcessorList
from vaswani.generation import incremental_vaswani, linear_vaswani, products_vaswani
from vaswani.generation.linear_vaswani import PreparedLinear, prepare, prepared_copy
from vaswani.modeling.quantization_vaswani import VaswaniInt8Quantizer

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniInt8Config

DTYPES = [torch.float32, torch.bfloat16]
FORMS = [*DTYPES, torch.int8]
in_all_forms = pytest.mark.parametrize("dtype", FORMS)
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 11, 12, 2]])
# torch's operators and the kernels round differently.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.int8: 0.2}
packs = pytest.mark.skipif(
    not linear_vaswani._packed_dtypes(), reason="PyTorch has no oneDNN on this CPU"
)


def build(dtype=torch.float32, seed=0, **overrides):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 300,
        "d_model": 128,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "attention_bias": True,
        "dropout": 0.0,
    }
    model = VaswaniForConditionalGeneration(VaswaniConfig(**{**sizes, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    if dtype == torch.int8:
        return rounded(model)
    return model.to(dtype).eval()


def rounded(model):
    """Give a model int8 weights, as `from_pretrained` does."""
    quantizer = VaswaniInt8Quantizer(VaswaniInt8Config(), pre_quantized=False)
    quantizer.preprocess_model(model)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    return model.eval()


def form(model):
    """The dtype of a model's matrices."""
    return model.lm_head.weight.dtype


def answer(model, num_beams=4, **call):
    """Return tokens and scores of a beam search over a few steps."""
    call = {"max_new_tokens": 6, "eos_token_id": None, "return_dict_in_generate": True, **call}
    output = model.generate(SOURCE, num_beams=num_beams, **call)
    if output.sequences_scores is None:  # transformers returns them only with output_scores
        output = model.generate(SOURCE, num_beams=num_beams, **call, output_scores=True)
    return output.sequences, output.sequences_scores


def equal(one, other):
    return all(map(torch.equal, one, other))


def layer_of(model):
    return model.model.decoder.layers[1]


def bits(tensor):
    """Return a NumPy view of the memory of a parameter with any dtype."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.detach().view(integers[tensor.itemsize]).numpy()


def write_from_another_process(tensor):
    tensor[0, 0] = 9.0


def share_and_write(model):
    weight = layer_of(model).fc1.weight
    weight.data.share_memory_()
    answer(model)
    process = multiprocessing.get_context("fork").Process(
        target=write_from_another_process, args=(weight.detach(),)
    )
    process.start()
    process.join()


def train_with(make_optimizer, mask=False):
    def train(model):
        optimizer = make_optimizer(model.parameters())
        for _ in range(3):
            model.train()(input_ids=SOURCE, labels=SOURCE).loss.backward()
            if mask:
                for parameter in model.parameters():
                    parameter.grad[parameter.grad.abs() < parameter.grad.abs().max()] = 0
            optimizer.step()
            optimizer.zero_grad()
        model.eval()

    return train


def merge_adapter(targets, rows=None):
    def merge(model):
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        if rows is not None:
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.data[rows:].zero_()
        adapted.merge_and_unload()

    return merge


def replace_layer(model):
    fresh = nn.Linear(128, 256)
    layer_of(model).fc1 = fresh.to(model.dtype)


def load_in_place(model):
    other = build(form(model), seed=3)
    model.load_state_dict(other.state_dict())


def load_by_assignment(model):
    other = build(form(model), seed=3)
    model.load_state_dict(other.state_dict(), assign=True)


def load_from_file(model, folder):
    save_model(build(form(model), seed=3), str(folder / "model.safetensors"))
    load_model(model, str(folder / "model.safetensors"))


def set_storage(model):
    weight = layer_of(model).fc2.weight
    raw = io.BytesIO()
    torch.save(torch.ones(1, dtype=weight.dtype) * 9, raw)
    storage = weight.untyped_storage()
    for index, byte in enumerate(torch.tensor([9.0], dtype=weight.dtype).untyped_storage()):
        storage[index] = byte


def move_memory(model):
    weight = layer_of(model).self_attn.out_proj.weight
    ctypes.memset(weight.data_ptr() + 3 * weight.itemsize, 0x41, weight.itemsize)


def swap_with_another(model):
    attention = layer_of(model).self_attn
    torch.utils.swap_tensors(attention.q_proj.weight, attention.v_proj.weight)


def through_vector(model):
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 0.9, model.parameters())


def parametrize(model):
    parametrizations.weight_norm(layer_of(model).fc1)
    layer_of(model).fc1.parametrizations.weight.original0.data.mul_(2)


def one_bit(model):
    weight = bits(layer_of(model).self_attn.out_proj.weight)
    weight[7, 11] ^= 1 << (8 * weight.itemsize - 2)  # of the exponent


def exchange_rows(model):
    rows = model.lm_head.weight.data
    rows[[3, 145]] = rows[[145, 3]]


def fresh(weight):
    """Other values of the same shape and dtype."""
    if weight.dtype == torch.int8:
        return torch.randint(-127, 128, weight.shape).to(torch.int8)
    return torch.randn(weight.shape, dtype=weight.dtype)


def parameter(values):
    return nn.Parameter(values, requires_grad=values.is_floating_point())


def far(weight):
    """A number far from all values of a weight."""
    return 127 if weight.dtype == torch.int8 else 9


def layers_of(model):
    """Return linear layers that are packed alone, in decoder and encoder."""
    layer = layer_of(model)
    return layer.fc1, layer.fc2, layer.self_attn.out_proj, model.model.encoder.layers[0].fc1


def negate(layer, name):
    """Give a layer a view of the negative values of a parameter."""
    setattr(layer, name, parameter(torch._neg_view(getattr(layer, name).data)))


@torch.no_grad()
def set_to_another(model):
    layer_of(model).fc2.weight.set_(fresh(layer_of(model).fc2.weight))


def write_first_value(model):
    weight = layer_of(model).fc1.weight
    weight.data[0, 0] = far(weight)


WAYS = {
    "columns that samples would miss": lambda m: layer_of(m).fc2.weight.data[:, 128:].mul_(-8),
    "one value through data": lambda m: layer_of(m).encoder_attn.q_proj.weight.data[3, 5].fill_(9),
    "the first value": write_first_value,
    "the last value": lambda m: layer_of(m).self_attn.v_proj.weight.data[-1, -1].fill_(9),
    "the middle one of joined layers": lambda m: layer_of(m).self_attn.k_proj.weight.data.neg_(),
    "one bit": one_bit,
    "a block of signs": lambda m: layer_of(m).fc1.weight.data[:64, :64].neg_(),
    "all signs": lambda m: layer_of(m).fc1.weight.data.neg_(),
    "two rows exchanged": exchange_rows,
    "rows in another order": lambda m: bits(layer_of(m).fc1.weight).__setitem__(
        slice(None), bits(layer_of(m).fc1.weight)[::-1].copy()
    ),
    "columns in another order": lambda m: bits(layer_of(m).fc1.weight).__setitem__(
        slice(None), bits(layer_of(m).fc1.weight)[:, ::-1].copy()
    ),
    "the transposed matrix": lambda m: setattr(
        layer_of(m).self_attn.out_proj.weight,
        "data",
        layer_of(m).self_attn.out_proj.weight.data.t(),
    ),
    "a row of the vocabulary": lambda m: m.lm_head.weight.data[7].mul_(30),
    "a row through the tied embedding": lambda m: m.model.encoder.embed_tokens.weight.data[
        9
    ].normal_(),
    "in place": lambda m: layer_of(m).fc1.weight.detach().mul_(2),
    "without gradients": lambda m: torch.no_grad()(layer_of(m).fc1.weight.zero_)(),
    "initialised again": lambda m: nn.init.normal_(layer_of(m).fc2.weight),
    "new data": lambda m: setattr(layer_of(m).fc2.weight, "data", fresh(layer_of(m).fc2.weight)),
    "a new parameter": lambda m: setattr(
        layer_of(m).fc2, "weight", parameter(fresh(layer_of(m).fc2.weight))
    ),
    "set to another tensor": set_to_another,
    "a view of negative values": lambda m: setattr(
        layer_of(m).fc2, "weight", parameter(torch._neg_view(layer_of(m).fc2.weight.data))
    ),
    "embeddings in a view of negative values": lambda m: setattr(
        m.model.decoder.embed_tokens,
        "weight",
        parameter(torch._neg_view(m.model.decoder.embed_tokens.weight.data)),
    ),
    "biases in views of negative values": lambda m: list(map(negate, layers_of(m), ["bias"] * 4)),
    "scales in views of negative values": lambda m: list(
        map(negate, [*layers_of(m), m.lm_head], ["weight_scale"] * 5)
    ),
    "other embeddings of the decoder": lambda m: setattr(
        m.model.decoder.embed_tokens,
        "weight",
        parameter(m.model.decoder.embed_tokens.weight.data.flip(0)),
    ),
    "a new layer": replace_layer,
    "exchanged layers": lambda m: setattr(
        m.model.decoder, "layers", nn.ModuleList(reversed(m.model.decoder.layers))
    ),
    "exchanged projections": lambda m: [
        vars(layer_of(m).self_attn)["_modules"].update(
            q_proj=layer_of(m).self_attn.k_proj, k_proj=layer_of(m).self_attn.q_proj
        )
    ],
    "a state dict": load_in_place,
    "a state dict by assignment": load_by_assignment,
    "a vector of all parameters": through_vector,
    "swapped tensors": swap_with_another,
    "NumPy": lambda m: bits(layer_of(m).fc1.weight).__setitem__(
        (0, 0), 0x41 if form(m) == torch.int8 else 0x4110
    ),
    "DLPack": lambda m: torch.from_dlpack(layer_of(m).fc2.weight.detach()).fill_(0.25),
    "the storage": set_storage,
    "raw memory": move_memory,
    "a list of tensors": lambda m: torch._foreach_mul_(
        [parameter.data for parameter in m.parameters()], 0.9
    ),
    "scattered values": lambda m: (
        layer_of(m).fc1.weight.data.view(-1).index_fill_(0, torch.arange(5, 9000, 257), 3.0)
    ),
    "another process": share_and_write,
    "SGD": train_with(lambda p: torch.optim.SGD(p, lr=0.1)),
    "fused AdamW with a mask": train_with(
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, fused=True), mask=True
    ),
    "fused Adam": train_with(lambda p: torch.optim.Adam(p, lr=0.01, fused=True)),
    "foreach Adam": train_with(lambda p: torch.optim.Adam(p, lr=0.01, foreach=True)),
    "a merged adapter": merge_adapter(["fc1", "q_proj"]),
    "a merged adapter of one row": merge_adapter(["fc2"], rows=1),
    "pruning": lambda m: prune.l1_unstructured(layer_of(m).fc1, "weight", amount=0.5),
    "weight normalisation": parametrize,
    "a hook that makes the weight": lambda m: layer_of(m).fc1.register_forward_pre_hook(
        lambda layer, _: layer.weight.data.fill_(0.01)
    ),
    "a hook on the output": lambda m: layer_of(m).fc1.register_forward_hook(
        lambda layer, _, output: output * 0
    ),
    "the bias": lambda m: layer_of(m).fc1.bias.data.add_(1),
    "a new bias": lambda m: setattr(
        layer_of(m).self_attn.q_proj, "bias", nn.Parameter(torch.ones(128, dtype=m.dtype) * 3)
    ),
    "the bias of a joined layer": lambda m: layer_of(m).self_attn.v_proj.bias.data[-1].fill_(9),
    "no bias": lambda m: setattr(layer_of(m).self_attn.v_proj, "bias", None),
    "a LayerNorm": lambda m: layer_of(m).final_layer_norm.weight.data.mul_(2),
    "keys of the source": lambda m: layer_of(m).encoder_attn.k_proj.weight.data.neg_(),
    "the encoder": lambda m: m.model.encoder.layers[0].fc1.weight.data[:, 100:].mul_(-8),
    "another vocabulary": lambda m: m.resize_token_embeddings(310).weight.data[305].fill_(1),
    "float64 and back": lambda m: (m.double(), layer_of(m).fc1.weight.data.neg_(), m.to(m.dtype)),
}


# int8 weights are not trained, and take no other values than int8.
FLOAT_WAYS = {
    *("SGD", "fused AdamW with a mask", "fused Adam", "foreach Adam", "pruning"),
    *("a merged adapter", "a merged adapter of one row", "weight normalisation"),
    *("a row through the tied embedding", "initialised again", "another vocabulary"),
    *("a vector of all parameters", "a list of tensors"),
}
INT8_WAYS = {"scales in views of negative values"}


@packs
@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_after_a_change_answers_from_the_new_weights(way, dtype):
    if dtype == torch.int8 and way in FLOAT_WAYS:
        pytest.skip("int8 weights are not changed in this way")
    if dtype != torch.int8 and way in INT8_WAYS:
        pytest.skip("only int8 weights have scales")
    model = build(dtype)
    before = answer(model)
    for _ in range(3):  # the kernels watch memory from the third call on
        assert equal(answer(model), before)
    WAYS[way](model)
    after = answer(model)
    assert not equal(after, before)
    assert equal(after, answer(copy.deepcopy(model)))


@pytest.mark.parametrize("dtype", FORMS)
def test_a_bias_of_one_value_counts_for_all_outputs(dtype):
    model = build(dtype)
    for layer in layers_of(model):
        layer.bias = parameter(torch.full((layer.out_features,), 0.5, dtype=model.dtype))
    expected = answer(model)[1]
    for layer in layers_of(model):
        layer.bias = parameter(layer.bias.data[:1].clone())
    torch.testing.assert_close(answer(model)[1], expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("name", "part"), [("fc1", "bias"), ("fc1", "weight_scale"), ("final_layer_norm", "weight")]
)
def test_a_parameter_of_another_length_is_an_error_of_torch(name, part):
    model = build(torch.int8)
    answer(model)
    layer = getattr(layer_of(model), name)
    setattr(layer, part, parameter(getattr(layer, part).data[:100].clone()))
    with pytest.raises(RuntimeError, match="100"):
        answer(model)


@packs
def test_old_copies_of_weights_are_freed_before_new_ones_are_made(monkeypatch):
    if products_vaswani.library() is None:
        pytest.skip("this machine compiles no kernels")
    model, alive = build(), []
    answer(model)
    layer = layer_of(model).fc1
    (packed,) = linear_vaswani._packed_of[layer].values()
    old = weakref.ref(packed.panels)
    del packed
    fingerprint = products_vaswani.fingerprint
    monkeypatch.setattr(
        products_vaswani,
        "fingerprint",
        lambda weight: alive.append(old() is not None) or fingerprint(weight),
    )
    layer.weight.data.neg_()
    answer(model)
    assert alive == [False]


@pytest.mark.parametrize("dtype", FORMS)
def test_a_call_after_loading_a_file_answers_from_the_file(dtype, tmp_path):
    model = build(dtype)
    for _ in range(3):
        answer(model)
    load_from_file(model, tmp_path)
    assert equal(answer(model), answer(build(dtype, seed=3)))


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("call", [{"num_beams": 1}, {"do_sample": True, "num_beams": 1}])
def test_greedy_search_and_sampling_see_a_change(call, dtype):
    model = build(dtype)

    def tokens(of):
        torch.manual_seed(0)
        return of.generate(SOURCE, max_new_tokens=6, eos_token_id=None, **call)

    before = tokens(model)
    for _ in range(2):
        tokens(model)
    layer_of(model).fc2.weight.data[:, 128:] *= -8
    assert not torch.equal(tokens(model), before)
    assert torch.equal(tokens(model), tokens(copy.deepcopy(model)))


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_global_hook_sees_the_modules_of_the_model(num_beams):
    model, seen = build(), set()
    with register_module_forward_pre_hook(lambda module, _: seen.add(module)):
        model.generate(SOURCE, num_beams=num_beams, max_new_tokens=3)
    assert layer_of(model).fc1 in seen
    assert seen <= set(model.modules())


@in_all_forms
def test_parameters_that_are_replaced_for_a_while_are_used_for_that_while(dtype):
    # Afterwards torch restores another weight for a module with two names, such as a
    # shared embedding.
    model = build(dtype, share_encoder_decoder_embeddings=False)
    before = answer(model)
    others = {
        name: value * 0.5 if value.is_floating_point() else value
        for name, value in model.named_parameters()
    }
    with _reparametrize_module(model, others, tie_weights=True):
        meanwhile = answer(model)
    assert not equal(meanwhile, before)
    assert equal(answer(model), before)


@packs
@in_all_forms
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_layers_that_change_during_a_call_leave_its_answer(dtype, norm_position, monkeypatch):
    model = build(dtype, norm_position=norm_position)
    before = answer(model)
    steps, step = [], incremental_vaswani.IncrementalDecoder.step

    def step_and_write(*args):
        steps.append(step(*args))
        if len(steps) == 2:
            for name, parameter in model.model.decoder.named_parameters():
                if "embed" not in name:
                    parameter.data.copy_(parameter.data.flip(0))
        return steps[-1]

    monkeypatch.setattr(incremental_vaswani.IncrementalDecoder, "step", step_and_write)
    assert equal(answer(model), before)
    assert not equal(answer(model), before)


class OpenCall:
    """A call of `generate` that waits in its second step until it is released."""

    def __init__(self, model):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(model,))

    def _run(self, model):
        steps = itertools.count()

        def wait(input_ids, scores):
            if next(steps) == 1:
                self.reached.set()
                assert self.go_on.wait(30)
            return scores

        model.generate(SOURCE, max_new_tokens=4, logits_processor=LogitsProcessorList([wait]))

    def __enter__(self):
        self.thread.start()
        assert self.reached.wait(30)

    def __exit__(self, *exception):
        self.go_on.set()
        self.thread.join()


@in_all_forms
def test_calls_beside_an_open_one_see_a_change(dtype):
    model = build(dtype)
    before = answer(model)
    with OpenCall(model):
        load_in_place(model)
        answers = [answer(model) for _ in range(5)]
    expected = answer(build(dtype, seed=3))
    assert not equal(before, expected)
    assert all(equal(found, expected) for found in answers)


def copied_by_pickle(model):
    return pickle.loads(pickle.dumps(model))


@in_all_forms
@pytest.mark.parametrize("make", [copy.deepcopy, AveragedModel, copied_by_pickle, copy.copy])
def test_a_copy_made_during_a_call_is_a_model_of_its_own(make, dtype):
    model = build(dtype)
    expected = answer(model)
    with OpenCall(model):
        copied = make(model)
    # int8 weights are not trained, and a shallow copy shares the parameters.
    if dtype != torch.int8 and make is not copy.copy:
        copied.train()(input_ids=SOURCE, labels=SOURCE).loss.backward()
        assert all(parameter.grad is not None for parameter in copied.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
    copied.eval()
    assert equal(answer(copied.module if make is AveragedModel else copied), expected)


def attributes(model):
    """Return the identities of all attributes of a model and its parts."""
    return {
        (name, key): id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    } | {
        (name, key, part): id(content)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, dict)
        for part, content in value.items()
    }


@in_all_forms
@pytest.mark.parametrize("call", [{"num_beams": 4}, {}, {"do_sample": True}])
def test_an_open_call_has_replaced_no_attribute(call, dtype, monkeypatch):
    model = build(dtype)
    model.generate(SOURCE, max_new_tokens=2, **call)
    before, seen = attributes(model), []
    step = incremental_vaswani.IncrementalDecoder.step

    def watched(*arguments, **options):
        seen.append(attributes(model) == before)
        return step(*arguments, **options)

    monkeypatch.setattr(incremental_vaswani.IncrementalDecoder, "step", watched)
    model.generate(SOURCE, max_new_tokens=3, **call)
    assert len(seen) > 1
    assert all(seen)
    assert attributes(model) == before


@in_all_forms
def test_500_interrupts_leave_the_model_as_it_was(dtype):
    model = build(dtype, decoder_layers=1)
    expected = answer(model)
    before = attributes(model)
    durations = []
    for _ in range(3):
        started = time.perf_counter()
        answer(model)
        durations.append(time.perf_counter() - started)
    shortest = min(durations)  # later interrupts would come after the call
    rng, interrupted = random.Random(0), 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while interrupted < 500:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, shortest))
                answer(model)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
                assert attributes(model) == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        torch.set_grad_enabled(True)  # an interrupt inside torch.no_grad itself leaves it off
    assert equal(answer(model), expected)


@in_all_forms
def test_eight_threads_answer_while_another_writes(dtype):
    model, changed = build(dtype), build(dtype, seed=3)
    old, new = answer(model), answer(changed)
    stop, failures = threading.Event(), []

    def write():
        weights = [copy.deepcopy(source.state_dict()) for source in (model, changed)]
        for state in itertools.cycle(weights):
            model.load_state_dict(state)
            if stop.is_set():
                return

    def ask():
        try:
            for _ in range(6):
                answer(model)
        except Exception as error:  # errors in threads would be lost
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(ask)
    stop.set()
    writer.join()
    assert not failures
    model.load_state_dict(changed.state_dict())
    with ThreadPoolExecutor(8) as pool:
        answers = [job.result() for job in [pool.submit(answer, model) for _ in range(16)]]
    assert all(equal(found, new) for found in answers)
    assert not equal(old, new)


@in_all_forms
def test_eight_threads_answer_while_another_moves_the_weights(dtype):
    # The allocator returns large weights to the system as soon as they are moved.
    model = build(dtype, decoder_ffn_dim=8192)
    expected, stop = answer(model), threading.Event()

    def move():
        while not stop.is_set():
            for weight in itertools.chain(model.parameters(), model.buffers()):
                weight.data = weight.data.clone()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = [job.result() for job in [pool.submit(answer, model) for _ in range(24)]]
    finally:
        stop.set()
        mover.join()
    assert all(equal(found, expected) for found in answers)


FORK = """
import os, sys, threading
sys.path[:0] = [{tests!r}, {root!r}]
import torch
torch.set_num_threads(1)
from test_weights_of_a_call import FORMS, OpenCall, answer, build, equal, load_in_place
for dtype in FORMS:
    model = build(dtype)
    for _ in range(3):
        answer(model)
    with OpenCall(model):
        child = os.fork()
        if child == 0:
            load_in_place(model)
            os._exit(0 if equal(answer(model), answer(build(dtype, seed=3))) else 3)
        status = os.waitpid(child, 0)[1]
    assert equal(answer(model), answer(build(dtype)))
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has no fork")
def test_a_process_forked_during_a_call_answers_from_its_own_weights():
    folder = Path(__file__).resolve().parent
    script = FORK.format(tests=str(folder), root=str(folder.parent))
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("dtype", "models"), [(torch.float32, 60), (torch.bfloat16, 30), (torch.int8, 30)]
)
def test_many_models_and_calls_leave_no_memory_behind(dtype, models):
    def used():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell the memory of a process")
    sizes = {"decoder_ffn_dim": 1024, "decoder_layers": 1}
    kept = build(dtype, **sizes)
    for _ in range(5):
        answer(kept, max_new_tokens=3)
    gc.collect()
    before, known, gone = used(), len(linear_vaswani._packed_of), []
    for _ in range(models):
        model = build(dtype, **sizes)
        for _ in range(2):
            answer(model, max_new_tokens=3)
        gone.append(weakref.ref(model))
        del model
    for _ in range(3 * models):
        answer(kept, max_new_tokens=3)
    gc.collect()
    assert not any(reference() for reference in gone)
    assert len(linear_vaswani._packed_of) == known
    one = sum(parameter.nbytes for parameter in kept.parameters())
    assert used() - before < 20 * one


@packs
class TestPrepare:
    """`prepare` computes the same products, with packed weights that are made once and shared."""

    @pytest.fixture
    def layers(self):
        return nn.Linear(160, 128), nn.Linear(160, 200, bias=False), nn.Linear(160, 150)

    @pytest.mark.parametrize("number", [1, 2, 3])
    @pytest.mark.parametrize("dtype", DTYPES)
    @torch.no_grad()
    def test_products_are_those_of_the_layers(self, layers, number, dtype):
        if dtype not in linear_vaswani._packed_dtypes():
            pytest.skip(f"oneDNN packs no {dtype} on this CPU")
        layers = [layer.to(dtype) for layer in layers[:number]]
        product = prepare(*layers)
        for _ in range(3):
            states = torch.randn(3, 5, 160, dtype=dtype)
            expected = torch.cat([layer(states) for layer in layers], dim=-1)
            torch.testing.assert_close(product(states), expected)
        assert len(linear_vaswani._packed_of[layers[0]]) == 1

    @pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()])
    @pytest.mark.parametrize("dtype", DTYPES)
    @torch.no_grad()
    def test_an_activation_in_the_product_changes_no_bit(self, layers, activation, dtype):
        layer, states = layers[0].to(dtype), torch.randn(8, 160, dtype=dtype)
        plain, activated = prepare(layer), prepare(layer, activation=activation)
        for _ in range(3):  # without packed weights at first
            assert torch.equal(activated(states), activation(plain(states)))

    @torch.no_grad()
    def test_activations_with_hooks_are_called(self, layers):
        activation, calls = nn.ReLU(), []
        activation.register_forward_hook(lambda *_: calls.append(1))
        prepare(layers[0], activation=activation)(torch.randn(8, 160))
        assert calls == [1]

    @torch.no_grad()
    def test_a_weight_is_packed_in_the_second_product_and_then_shared(self, layers, monkeypatch):
        packed = []

        class Watched(linear_vaswani._PackedForTorch):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                packed.append(self)

        monkeypatch.setattr(linear_vaswani, "_PackedForTorch", Watched)
        states, counts = torch.randn(8, 160), []
        for _ in range(3):
            product = prepare(layers[0])
            for _ in range(3):
                product(states)
                counts.append(len(packed))
        assert counts == [0, 1, 1, 1, 1, 1, 1, 1, 1]

    def test_gradients_and_autocast_use_the_layers_themselves(self, layers):
        states = torch.randn(8, 160)
        prepare(layers[0])(states).sum().backward()
        assert layers[0].weight.grad.abs().sum() > 0
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert prepare(layers[0])(states).dtype == torch.bfloat16

    @torch.no_grad()
    def test_a_prepared_copy_shares_parameters_and_stands_for_its_original(self):
        model = build()
        copied = prepared_copy(model, lambda module: True)
        assert copied is not model
        assert isinstance(copied.lm_head, PreparedLinear)
        assert copied.lm_head.weight is model.lm_head.weight
        torch.testing.assert_close(
            copied(SOURCE, decoder_input_ids=SOURCE).logits,
            model(SOURCE, decoder_input_ids=SOURCE).logits,
        )
        states = torch.randn(8, 128)
        product = prepare(copied.lm_head)
        product(states), product(states)
        assert model.lm_head in linear_vaswani._packed_of
        assert copied.lm_head not in linear_vaswani._packed_of

    def test_a_compiled_step_multiplies_by_the_weights_of_the_layers(self):
        model, graphs = build(), []

        def keep(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        compilation = CompileConfig(backend=keep, mode=None)
        compilation._compile_all_devices = True
        call = {"cache_implementation": "static", "max_new_tokens": 4}
        expected = model.generate(SOURCE, **call)
        assert torch.equal(model.generate(SOURCE, **call, compile_config=compilation), expected)
        assert graphs
        assert "linear" in graphs[0]
        assert "mkldnn" not in graphs[0]  # Inductor has no kernel for weights packed by torch

    @torch.no_grad()
    def test_a_copy_keeps_the_modules_that_may_not_be_copied(self):
        model = build()
        own = layer_of(model)
        copied = prepared_copy(model, lambda module: module is not own)
        assert layer_of(copied) is own
        assert type(own.fc1) is nn.Linear
        assert prepared_copy(model, lambda module: False) is model

    def test_hooks_on_a_copy_stay_there(self):
        model = build()
        with torch.no_grad():
            copied = prepared_copy(model, lambda module: True)
        copied.model.decoder.register_forward_hook(lambda *_: None)
        assert not model.model.decoder._forward_hooks

    def test_generating_under_autocast_answers_as_transformers_does(self):
        model = build()
        with torch.autocast("cpu", torch.bfloat16):
            ours = answer(model)
            theirs = answer(model, output_scores=True)
        torch.testing.assert_close(ours[1], theirs[1], rtol=0.01, atol=0)


def test_training_between_two_calls_is_seen():
    model, source = build(decoder_layers=1), torch.tensor([[5, 6, 2]])
    model.generate(source, max_new_tokens=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        model.train()(input_ids=source, labels=torch.tensor([[9, 8, 7, 2]])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.eval().generate(source).tolist() == [[2, 9, 8, 7, 2]]
