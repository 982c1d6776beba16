"""The configuration: validation, error messages, presets, saving and loading."""

import ast
import copy
import json
import logging
import math
import re
from pathlib import Path

import pytest
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassFieldValidationError,
)
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniModel,
)

# A value of a wrong type for every field.
WRONG_TYPES = {
    "vocab_size": "37000",
    "decoder_vocab_size": 37000.0,
    "d_model": 512.0,
    "encoder_layers": "6",
    "decoder_layers": 6.0,
    "encoder_attention_heads": None,
    "decoder_attention_heads": 8.0,
    "encoder_ffn_dim": [2048],
    "decoder_ffn_dim": 2048.0,
    "d_k": 64.0,
    "d_v": "64",
    "dropout": "0.1",
    "attention_dropout": None,
    "activation_dropout": [0.0],
    "label_smoothing": "0.1",
    "activation_function": 1,
    "norm_position": "middle",
    "final_layer_norm": "no",
    "position_encoding": "rotary",
    "position_offset": 1.5,
    "max_position_embeddings": "512",
    "attention_bias": 0,
    "lm_head_bias": "yes",
    "scale_embedding": "yes",
    "layer_norm_eps": "1e-5",
    "init_std": "0.02",
    "initializer": "he",
    "tie_word_embeddings": 1,
    "share_encoder_decoder_embeddings": "true",
    "use_cache": 1,
    "is_encoder_decoder": 1,
    "pad_token_id": "<pad>",
    "unk_token_id": 1.0,
    "eos_token_id": "</s>",
    "bos_token_id": "<s>",
    "decoder_start_token_id": 2.0,
}


@pytest.fixture
def warnings_logged():
    """Collect the warnings of the configuration, even if its logger does not propagate."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(VaswaniConfig.__module__)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def own_fields():
    return [
        name for name, kind in VaswaniConfig.__annotations__.items() if "ClassVar" not in str(kind)
    ]


def test_every_field_is_listed_above():
    assert sorted(WRONG_TYPES) == sorted(own_fields())


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused_by_field_name(field):
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        VaswaniConfig(**{field: WRONG_TYPES[field]})
    config = VaswaniConfig()
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        setattr(config, field, WRONG_TYPES[field])


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "d_model", "encoder_layers", "decoder_attention_heads", "position_offset"],
)
def test_a_truth_value_is_not_a_size(field):
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        VaswaniConfig(**{field: True})


REFUSED = {
    "d_model is not a multiple of the encoder's heads": (
        {"d_model": 512, "encoder_attention_heads": 7},
        r"d_model \(512\).*encoder_attention_heads \(7\).*d_k and d_v",
    ),
    "d_model is not a multiple of the decoder's heads": (
        {"d_model": 512, "decoder_attention_heads": 6},
        r"d_model \(512\).*decoder_attention_heads \(6\).*d_k and d_v",
    ),
    "d_k alone does not say how wide the values are": (
        {"d_model": 512, "encoder_attention_heads": 7, "d_k": 64},
        r"d_model \(512\).*encoder_attention_heads \(7\).*d_k and d_v",
    ),
    "odd d_model has half a pair of sine and cosine": (
        {"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
        r"d_model \(9\).*even.*sinusoidal.*learned",
    ),
    "odd d_model with Marian's layout": (
        {
            "d_model": 9,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 3,
            "position_encoding": "sinusoidal_concat",
        },
        r"d_model \(9\).*even.*sinusoidal_concat.*learned",
    ),
    "odd d_model with tensor2tensor's layout": (
        {
            "d_model": 9,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 3,
            "position_encoding": "sinusoidal_t2t",
        },
        r"d_model \(9\).*even.*sinusoidal_t2t.*learned",
    ),
    "one table for two vocabularies of unequal sizes": (
        {"vocab_size": 100, "decoder_vocab_size": 90},
        r"share_encoder_decoder_embeddings.*100.*90.*share_encoder_decoder_embeddings=False",
    ),
    "learned positions without a last one": (
        {"position_encoding": "learned"},
        r"learned.*max_position_embeddings.*None.*sinusoidal",
    ),
    "positions before the first": ({"position_offset": -1}, r"position_offset.*0 or more.*-1"),
    "a norm that divides by zero": (
        {"layer_norm_eps": 0.0},
        r"layer_norm_eps.*greater than 0.*0\.0",
    ),
    "fresh embeddings that are all equal": ({"init_std": 0.0}, r"init_std.*greater than 0.*0\.0"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_contradictions_are_refused_with_field_value_and_way_out(reason):
    fields, message = REFUSED[reason]
    with pytest.raises(StrictDataclassClassValidationError) as error:
        VaswaniConfig(**fields)
    assert re.search(message, str(error.value), flags=re.DOTALL)


@pytest.mark.parametrize(
    "field", ["dropout", "attention_dropout", "activation_dropout", "label_smoothing"]
)
@pytest.mark.parametrize("value", [-0.1, 1.0, 1, 1.5, math.nan, math.inf, -math.inf])
def test_probabilities_lie_in_the_half_open_unit_interval(field, value):
    with pytest.raises(StrictDataclassClassValidationError) as error:
        VaswaniConfig(**{field: value})
    assert re.search(rf"{field} must be in \[0, 1\), got {value}; 0 ", str(error.value))


@pytest.mark.parametrize(
    "field", ["dropout", "attention_dropout", "activation_dropout", "label_smoothing"]
)
@pytest.mark.parametrize("value", [0, 0.0, 0.5, 0.999])
def test_probabilities_below_one_are_accepted(field, value):
    assert getattr(VaswaniConfig(**{field: value}), field) == value


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "decoder_vocab_size",
        "d_model",
        "d_k",
        "d_v",
        "encoder_layers",
        "decoder_layers",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_are_at_least_one(field, value):
    with pytest.raises(StrictDataclassClassValidationError) as error:
        VaswaniConfig(**{field: value})
    assert re.search(rf"{field} must be at least 1, got {value}", str(error.value))


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_more_layers_than_anybody_trains_are_refused_before_they_are_built(side, tmp_path):
    VaswaniConfig(**{f"{side}_layers": 1000}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), f"{side}_layers": 10**9}))
    message = f"{side}_layers must be at most 1000, got 1000000000"
    for load in (AutoConfig.from_pretrained, VaswaniModel.from_pretrained):
        with pytest.raises(StrictDataclassClassValidationError, match=message):
            load(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"encoder_attention_heads": 7, "decoder_attention_heads": 7, "d_k": 64, "d_v": 64},
        {
            "d_model": 9,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 3,
            "position_encoding": "learned",
            "max_position_embeddings": 5,
        },
        {"vocab_size": 100, "decoder_vocab_size": 90, "share_encoder_decoder_embeddings": False},
    ],
)
def test_the_ways_out_named_by_the_errors_are_accepted(fields):
    config = VaswaniConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_a_contradiction_made_after_construction_is_refused_by_the_model(tiny_config):
    config = tiny_config()
    config.encoder_attention_heads = 3
    with pytest.raises(ValueError, match=r"d_model \(16\).*encoder_attention_heads \(3\)"):
        VaswaniModel(config)


# Names


MISSPELT = {
    "d_modle": ["d_model"],
    "D_MODEL": ["d_model"],
    "dropuot": ["dropout"],
    "dropouts": ["dropout"],
    "label_smoothin": ["label_smoothing"],
    "encoder_layer": ["encoder_layers"],
    "attention_biases": ["attention_bias"],
    "encoder-ffn-dim": ["encoder_ffn_dim"],
    "pad_token_ids": ["pad_token_id"],
    "hiden_size": ["hidden_size"],
    "num_hidden_layer": ["num_hidden_layers"],
    "dk": ["d_k"],
}
HEADS = ["encoder_attention_heads", "decoder_attention_heads"]
LAYERS = ["encoder_layers", "decoder_layers"]
WIDTHS = ["encoder_ffn_dim", "decoder_ffn_dim"]
TIES = ["tie_word_embeddings", "share_encoder_decoder_embeddings"]
FOREIGN = {
    **dict.fromkeys(["num_heads", "n_heads", "nhead", "heads"], HEADS),
    **dict.fromkeys(["num_layers", "n_layers", "layers"], LAYERS),
    **dict.fromkeys(["ffn_dim", "dim_feedforward", "d_ff", "intermediate_size"], WIDTHS),
    **dict.fromkeys(["ffn_hidden", "d_inner_hid", "intermediate_dim", "mlp_dim"], WIDTHS),
    "drop_prob": ["dropout"],
    "trg_vocab": ["decoder_vocab_size"],
    **dict.fromkeys(["tie_embeddings", "share_embeddings", "share_all_embeddings"], TIES),
    **dict.fromkeys(["hidden_dim", "embed_dim", "encoder_embed_dim"], ("d_model",)),
    **dict.fromkeys(["hidden_dropout_prob", "dropout_rate", "resid_pdrop"], ("dropout",)),
    "num_encoder_layers": ["encoder_layers"],
    "d_kv": ["d_k", "d_v"],
    "hidden_act": ["activation_function"],
    "norm_first": ["norm_position"],
    "max_len": ["max_position_embeddings"],
    "src_vocab_size": ["vocab_size"],
    "tgt_vocab_size": ["decoder_vocab_size"],
    "label_smoothing_factor": ["label_smoothing"],
    "layer_norm_epsilon": ["layer_norm_eps"],
    "initializer_range": ["init_std"],
}


@pytest.mark.parametrize(("wrong", "meant"), {**MISSPELT, **FOREIGN}.items())
def test_a_misspelt_or_foreign_name_is_refused_with_the_names_it_stands_for(wrong, meant, tmp_path):
    expected = f"'{wrong}' is unknown: did you mean {' and '.join(map(repr, meant))}\\?"
    for build in (
        lambda: VaswaniConfig(**{wrong: 4}),
        lambda: VaswaniConfig.preset("big", **{wrong: 4}),
        lambda: AutoConfig.for_model("vaswani", **{wrong: 4}),
    ):
        with pytest.raises(ValueError, match=expected):
            build()
    VaswaniConfig().save_pretrained(tmp_path)
    for loader in (VaswaniConfig, AutoConfig, VaswaniModel):
        with pytest.raises(ValueError, match=expected):
            loader.from_pretrained(tmp_path, **{wrong: 4})


def test_all_wrong_names_of_a_call_are_told_at_once():
    with pytest.raises(ValueError, match=r"'num_heads'.*'dropuot'.*did you mean 'dropout'\?"):
        VaswaniConfig(num_heads=4, dropuot=0.3, my_note="x")


@pytest.mark.parametrize("saved_by", ["transformers", "hand"])
@pytest.mark.parametrize(("wrong", "meant"), [("dropuot", "dropout"), ("num_heads", HEADS[0])])
def test_a_file_with_a_wrong_name_loads_with_a_warning_and_changes_nothing(
    saved_by, wrong, meant, tmp_path, warnings_logged
):
    fields = {"model_type": "vaswani"} if saved_by == "hand" else VaswaniConfig().to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**fields, wrong: 0.5}))
    loaders = (
        lambda: VaswaniConfig.from_pretrained(tmp_path),
        lambda: AutoConfig.from_pretrained(tmp_path),
        lambda: VaswaniConfig.from_dict({**fields, wrong: 0.5}),
        lambda: VaswaniConfig.from_json_file(tmp_path / "config.json"),
    )
    for number, load in enumerate(loaders, start=1):
        config = load()
        assert len(warnings_logged) == number
        assert f"{wrong!r} is unknown: did you mean {meant!r}" in warnings_logged[-1]
        assert getattr(config, wrong) == 0.5
        assert getattr(config, meant) == getattr(VaswaniConfig(), meant)
    # Copies of such a configuration do not warn either.
    for again in (copy.deepcopy(config), VaswaniConfig(**config.to_dict())):
        assert getattr(again, wrong) == 0.5
    config.save_pretrained(tmp_path / "again")
    assert getattr(VaswaniConfig.from_pretrained(tmp_path / "again"), wrong) == 0.5


def test_names_that_transformers_itself_gives_to_configurations_are_allowed(warnings_logged):
    known = vars(GenerationConfig()) | vars(PreTrainedConfig())
    names = {name for name in known if not name.startswith("_")} - set(own_fields())
    names |= {"encoder_layerdrop", "decoder_layerdrop", "classifier_dropout", "sep_token_id"}
    names |= {"forced_bos_token_id", "torch_dtype", "attn_implementation", "name_or_path"}
    for name in names - {"dtype", "problem_type"}:
        VaswaniConfig(**{name: known.get(name)})
    assert len(names) > 50
    assert warnings_logged == []


def test_a_preset_refuses_every_name_that_is_no_field():
    with pytest.raises(ValueError, match="'my_note' is unknown"):
        VaswaniConfig.preset("base", my_note="x")
    config = VaswaniConfig.preset("base", hidden_size=64, attn_implementation="eager")
    assert (config.d_model, config._attn_implementation) == (64, "eager")


def test_correct_foreign_and_alias_names_are_not_warned_about(warnings_logged, tmp_path):
    config = VaswaniConfig(**{name: getattr(VaswaniConfig(), name) for name in own_fields()})
    VaswaniConfig(hidden_size=256, architectures=["VaswaniModel"], id2label={0: "a"}, my_note="x")
    config.save_pretrained(tmp_path)
    VaswaniConfig.from_pretrained(tmp_path)
    assert warnings_logged == []


def test_transformers_common_names_are_the_papers_sizes():
    config = VaswaniConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=3)
    assert (config.d_model, config.encoder_attention_heads, config.encoder_layers) == (256, 4, 3)
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (256, 4, 3)


def test_the_target_vocabulary_is_the_sources_unless_given():
    assert VaswaniConfig(vocab_size=50).decoder_vocab_size == 50
    config = VaswaniConfig(
        vocab_size=50, decoder_vocab_size=60, share_encoder_decoder_embeddings=False
    )
    assert (config.vocab_size, config.decoder_vocab_size) == (50, 60)
    assert config.get_text_config(decoder=True).vocab_size == 60


# Presets

# Table 3 of the paper: perplexity, BLEU and, if given, millions of parameters.
TABLE_3 = {
    "base": (4.92, 25.8, 65),
    "A-h1": (5.29, 24.9, None),
    "A-h4": (5.00, 25.5, None),
    "A-h16": (4.91, 25.8, None),
    "A-h32": (5.01, 25.4, None),
    "B-dk16": (5.16, 25.1, 58),
    "B-dk32": (5.01, 25.4, 60),
    "C-N2": (6.11, 23.7, 36),
    "C-N4": (5.19, 25.3, 50),
    "C-N8": (4.88, 25.5, 80),
    "C-d256": (5.75, 24.5, 28),
    "C-d1024": (4.66, 26.0, 168),
    "C-dff1024": (5.12, 25.4, 53),
    "C-dff4096": (4.75, 26.2, 90),
    "D-drop0.0": (5.77, 24.6, None),
    "D-drop0.2": (4.95, 25.5, None),
    "D-ls0.0": (4.67, 25.3, None),
    "D-ls0.2": (5.47, 25.7, None),
    "E-learned": (4.92, 25.7, None),
    "big": (4.33, 26.4, 213),
}


def test_presets_are_the_rows_of_table_3_with_the_papers_numbers():
    rows = VaswaniConfig.presets()
    assert {
        name: (row["perplexity"], row["bleu"], row["parameters"]) for name, row in rows.items()
    } == TABLE_3
    assert {name: row["steps"] for name, row in rows.items() if row["steps"] != 100_000} == {
        "big": 300_000
    }


@pytest.mark.parametrize("name", TABLE_3)
def test_a_preset_differs_from_base_only_in_the_changes_listed(name):
    changes = VaswaniConfig.presets()[name]["changes"]
    base, row = VaswaniConfig(), VaswaniConfig.preset(name)
    differing = {
        field: getattr(row, field)
        for field in own_fields()
        if getattr(row, field) != getattr(base, field)
    }
    # Heads of base have width 64. Rows may set this width without differing from base.
    assert differing == {field: value for field, value in changes.items() if field in differing}
    assert {field: getattr(row, field) for field in changes} == changes


def test_the_default_configuration_is_base():
    assert VaswaniConfig().to_dict() == VaswaniConfig.preset("base").to_dict()


def test_changing_a_listed_preset_does_not_change_the_next_one():
    VaswaniConfig.presets()["big"]["changes"]["d_model"] = 1
    assert VaswaniConfig.preset("big").d_model == 1024


def test_keyword_arguments_replace_single_fields_of_a_preset():
    config = VaswaniConfig.preset("big", vocab_size=100, dropout=0.2)
    assert (config.d_model, config.vocab_size, config.dropout) == (1024, 100, 0.2)


def test_an_unknown_preset_is_named_beside_those_that_exist():
    with pytest.raises(ValueError, match="'huge'") as error:
        VaswaniConfig.preset("huge")
    for name in TABLE_3:
        assert name in str(error.value)


# Saving


UNUSUAL = {
    "vocab_size": 50,
    "decoder_vocab_size": 60,
    "share_encoder_decoder_embeddings": False,
    "d_model": 30,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 7,
    "decoder_attention_heads": 11,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 9,
    "d_k": 3,
    "d_v": 5,
    "dropout": 0,
    "attention_dropout": 0.25,
    "activation_dropout": 0.125,
    "label_smoothing": 0.0,
    "activation_function": "gelu",
    "norm_position": "pre",
    "final_layer_norm": True,
    "position_encoding": "learned",
    "position_offset": 2,
    "max_position_embeddings": 77,
    "attention_bias": True,
    "lm_head_bias": True,
    "scale_embedding": False,
    "layer_norm_eps": 1e-6,
    "init_std": 0.02,
    "initializer": "fairseq",
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": 1,
    "unk_token_id": 3,
    "eos_token_id": [2, 4],
    "bos_token_id": 0,
    "decoder_start_token_id": 0,
}


def test_every_field_survives_saving_and_loading(tmp_path):
    assert set(own_fields()) - set(UNUSUAL) == {"is_encoder_decoder"}
    VaswaniConfig(**UNUSUAL).save_pretrained(tmp_path)
    for loaded in (VaswaniConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is VaswaniConfig
        assert {name: getattr(loaded, name) for name in UNUSUAL} == UNUSUAL


@pytest.mark.parametrize("name", TABLE_3)
def test_every_preset_survives_saving_and_loading(tmp_path, name):
    config = VaswaniConfig.preset(name)
    config.save_pretrained(tmp_path)
    loaded = VaswaniConfig.from_pretrained(tmp_path)
    assert {field: getattr(loaded, field) for field in own_fields()} == {
        field: getattr(config, field) for field in own_fields()
    }


def test_a_saved_configuration_brings_the_code_that_it_names(tmp_path):
    VaswaniConfig().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    auto_map, pipelines = saved["auto_map"], saved["custom_pipelines"]
    assert {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"} <= set(auto_map)
    assert set(pipelines) == {"translation"}
    for reference in (*auto_map.values(), pipelines["translation"]["impl"]):
        module, class_name = reference.split(".")
        tree = ast.parse((tmp_path / f"{module}.py").read_text())
        assert class_name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_saved_code_imports_only_its_neighbours_and_the_core_dependencies(tmp_path):
    """The folder must work without this package."""
    VaswaniConfig().save_pretrained(tmp_path)
    files = {path.stem for path in Path(tmp_path).glob("*.py")}
    assert {"configuration_vaswani", "modeling_vaswani", "generation_vaswani"} <= files
    for name in files:
        for node in ast.walk(ast.parse((tmp_path / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert node.module in files
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] != "vaswani"
            elif isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "vaswani" for alias in node.names)


def test_saving_twice_and_from_a_loaded_configuration_gives_the_same_folder(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    VaswaniConfig(d_model=256).save_pretrained(first)
    VaswaniConfig.from_pretrained(first).save_pretrained(second)
    contents = [
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (first, second)
    ]
    assert contents[0] == contents[1]


def test_unknown_activation_functions_are_refused_with_the_known_ones():
    with pytest.raises(StrictDataclassClassValidationError, match=r"'relo' is unknown.*relu"):
        VaswaniConfig(activation_function="relo")


def test_every_model_class_refuses_a_configuration_broken_after_construction():
    for model_class in (VaswaniModel, VaswaniForConditionalGeneration, VaswaniEncoderModel):
        config = VaswaniConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=9)
        config.d_model = 15
        with pytest.raises(ValueError, match="d_model"):
            model_class(config)


def test_token_ids_of_other_models_are_not_taken_for_misspellings(warnings_logged):
    VaswaniConfig(sep_token_id=4, mask_token_id=5)
    assert warnings_logged == []
