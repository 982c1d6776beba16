"""Ways to change the weights of a model between two calls, as users and libraries do."""

import ctypes
import io

import peft
import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import multiprocessing, nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from vaswani.generation import linear_vaswani
from vaswani.modeling.quantization_vaswani import VaswaniInt8Quantizer

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniInt8Config

DTYPES = [torch.float32, torch.bfloat16]
FORMS = [*DTYPES, torch.int8]
in_all_forms = pytest.mark.parametrize("dtype", FORMS)
SIZES = {
    "vocab_size": 300,
    "d_model": 128,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "attention_bias": True,
    "dropout": 0.0,
}
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 11, 12, 2]])
# torch's operators and the kernels round differently.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.int8: 0.2}
packs = pytest.mark.skipif(
    not linear_vaswani._packed_dtypes(), reason="PyTorch has no oneDNN on this CPU"
)


def build(dtype=torch.float32, seed=0, **overrides):
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**{**SIZES, **overrides}))
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
