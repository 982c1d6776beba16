"""Private and undocumented names of other packages that this package calls or overrides.

An upgrade of transformers, torch, accelerate, peft or sacrebleu may remove or change them without
notice. A test with the name then fails. The second half searches for names missing in the tables.
"""

import ast
import contextlib
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import vaswani

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = ("configuration", "tokenization", "generation", "modeling", "corpora", "training")
SUBPACKAGES += ("conversion", "hub_cards", "pictures", "demo", "commands", "vaswani")
SUBPACKAGES += ("examples", "benchmarks")
PACKAGES = ("transformers", "torch", "accelerate", "peft", "sacrebleu")

# Methods that are called or overridden, with their parameters.
METHODS = {
    "transformers.PreTrainedConfig": {
        "_dict_from_json_file": "cls json_file",
        "_get_generation_parameters": "self",
        "get_config_dict": "cls pretrained_model_name_or_path kwargs",
        "validate_architecture": "self",
    },
    "transformers.GenerationMixin": {
        "_assisted_decoding": "self input_ids logits_processor stopping_criteria "
        "generation_config synced_gpus streamer inputs_tensor assistant_model "
        "assistant_tokenizer tokenizer model_kwargs",
        "_beam_search": "self input_ids logits_processor stopping_criteria generation_config "
        "synced_gpus model_kwargs",
        "_check_early_stop_heuristic": "is_early_stop_heuristic_unsatisfied running_beam_scores "
        "beam_scores is_sent_finished cur_len max_length decoder_prompt_len early_stopping "
        "length_penalty",
        "_get_candidate_generator": "self generation_config input_ids inputs_tensor "
        "logits_processor model_kwargs assistant_model target_tokenizer assistant_tokenizer",
        "_prepare_cache_for_generation": "self generation_config model_kwargs generation_mode "
        "batch_size max_cache_length",
        "_prepare_generation_config": "self generation_config kwargs",
        "_sample": "self input_ids logits_processor stopping_criteria generation_config "
        "synced_gpus streamer model_kwargs",
        "_update_finished_beams": "self sequences topk_running_sequences beam_scores "
        "topk_log_probs beam_indices topk_running_beam_indices "
        "is_early_stop_heuristic_unsatisfied is_sent_finished next_token_hits_stopping_criteria "
        "top_num_beam_mask num_beams cur_len decoder_prompt_len length_penalty early_stopping",
        "_validate_generation_mode": "self generation_mode generation_config "
        "generation_mode_kwargs",
        "adjust_generation_fn": "self generation_config from_auto_class from_pipeline "
        "pretrained_model_name_or_path cache_dir force_download proxies local_files_only token "
        "revision subfolder trust_remote_code kwargs",
    },
    "transformers.PreTrainedModel": {
        "_from_config": "cls config kwargs",
        "_get_resized_embeddings": "self old_embeddings new_num_tokens pad_to_multiple_of "
        "mean_resizing",
        "_get_resized_lm_head": "self old_lm_head new_num_tokens transposed mean_resizing",
        "_init_weights": "self module",
        "_load_pretrained_model": "model state_dict checkpoint_files load_config expected_keys",
        "_resize_token_embeddings": "self new_num_tokens pad_to_multiple_of mean_resizing",
        "_upload_modified_files": "self working_dir repo_id files_timestamps commit_message token "
        "create_pr revision commit_description",
        "gather_sharded_state_dict_for_save": "self model_to_save state_dict distributed_config "
        "save_on_this_rank",
        "init_parallel_plans": "self",
        "maybe_distribute_model": (
            "cls model distributed_config mesh_manager",
            "cls model distributed_config device_mesh",  # 5.17
        ),
    },
    "transformers.quantizers.HfQuantizer": {
        "_dequantize": "self model dtype",
        "_process_model_after_weight_loading": "self model kwargs",
        "_process_model_before_weight_loading": "self model kwargs",
        "is_serializable": "self",
    },
    "transformers.Pipeline": {
        "_forward": "self input_tensors forward_parameters",
        "_sanitize_parameters": "self pipeline_parameters",
    },
    "transformers.GenerationConfig": {"_dict_from_json_file": "cls json_file"},
    "transformers.PreTrainedTokenizerFast": {
        "_add_tokens": "self new_tokens special_tokens",
        "_encode_plus": "self text text_pair add_special_tokens padding_strategy "
        "truncation_strategy max_length stride is_split_into_words pad_to_multiple_of padding_side "
        "return_tensors return_token_type_ids return_attention_mask return_overflowing_tokens "
        "return_special_tokens_mask return_offsets_mapping return_length verbose "
        "split_special_tokens kwargs",
        "_convert_encoding": "self encoding return_token_type_ids return_attention_mask "
        "return_overflowing_tokens return_special_tokens_mask return_offsets_mapping "
        "return_length verbose",
        "_convert_token_to_id_with_added_voc": "self token",
        "_decode": "self token_ids skip_special_tokens clean_up_tokenization_spaces kwargs",
        "_from_pretrained": (
            "cls resolved_vocab_files pretrained_model_name_or_path init_configuration "
            "init_inputs token cache_dir local_files_only _is_local trust_remote_code kwargs",
            # 5.17
            "cls resolved_vocab_files pretrained_model_name_or_path init_configuration "
            "init_inputs token cache_dir local_files_only _commit_hash _is_local "
            "trust_remote_code kwargs",
        ),
        "_save_pretrained": "self save_directory file_names legacy_format filename_prefix",
    },
    "transformers.Seq2SeqTrainer": {
        "_finish_current_push": "self",
        "_get_collator_with_removed_columns": "self data_collator description",
        "_get_eval_sampler": "self eval_dataset",
        "_get_grad_norm": "self model grad_norm",
        "_get_output_dir": "self trial",
        "_get_train_sampler": "self train_dataset",
        "_hp_search_setup": "self trial",
        "_issue_warnings_after_load": "self load_result",
        "_load_optimizer_and_scheduler": "self checkpoint",
        "_pad_tensors_to_max_len": "self tensor max_length",
        "_push_from_checkpoint": "self checkpoint_folder",
        "_remove_unused_columns": "self dataset description",
        "_run_epoch": "self model epoch train_dataloader steps_in_epoch "
        "num_update_steps_per_epoch trial ignore_keys_for_eval start_time resume_from_checkpoint "
        "epochs_trained steps_trained_in_current_epoch",
        "_save": "self output_dir state_dict",
        "_save_checkpoint": "self model trial",
        "_save_rng_state": "self output_dir",
        "get_batch_samples": "self epoch_iterator num_batches device",
        "get_total_train_batch_size": "self args",
    },
    "torch.nn.Module": {
        "_load_from_state_dict": "self state_dict prefix local_metadata strict missing_keys "
        "unexpected_keys error_msgs"
    },
    "torch.nn.modules.module": {"_has_any_global_hook": ""},
    "sacrebleu.metrics.base.Metric": {
        "_compute_score_from_stats": "self stats",
        "_extract_corpus_statistics": "self hypotheses references",
    },
}
# Attributes of classes and modules.
ATTRIBUTES = {
    "os": "_exit",
    "transformers.CompileConfig": "_compile_all_devices",
    "transformers.PreTrainedConfig": "_attn_implementation _auto_class",
    "transformers.PreTrainedModel": """
        _auto_class _can_compile_fullgraph _can_record_outputs _fsdp_plan
        _keys_to_ignore_on_load_unexpected _no_split_modules
        _skip_keys_device_placement _supports_attention_backend
        _supports_flex_attn _supports_sdpa _tied_weights_keys _tp_plan
    """,
    "transformers.Pipeline": """
        _load_feature_extractor _load_image_processor _load_processor _load_tokenizer
        _load_video_processor _pipeline_calls_generate
    """,
    "transformers.PreTrainedTokenizerFast": "_auto_class",
    "transformers.models.auto.configuration_auto.CONFIG_MAPPING": "_extra_content",
    "torch": "_C _int_mm _make_per_channel_quantized_tensor",
    "torch._C": "_are_functorch_transforms_active _functorch _len_torch_dispatch_stack",
    "torch._C._functorch": "is_legacy_batchedtensor",
}
# Operators of torch.ops.mkldnn, torch.ops.onednn and torch.ops.quantized, with their schemas.
OPERATORS = {
    "_is_mkldnn_bf16_supported": "() -> bool",
    "_linear_pointwise": "(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
    "str? algorithm) -> Tensor",
    "_reorder_linear_weight": "(Tensor self, int? batch_size=None) -> Tensor",
    "linear_prepack": "(Tensor W, Tensor? B=None) -> "
    "__torch__.torch.classes.quantized.LinearPackedParamsBase",
    "linear_with_input_q_dq_qweight_dq_output_fp32": "(Tensor X, float X_scale, int X_zero_point, "
    "__torch__.torch.classes.quantized.LinearPackedParamsBase W_prepack) -> Tensor",
    "qlinear_pointwise": "(Tensor qx, float x_scale, int x_zero_point, Tensor qw, Tensor w_scale, "
    "Tensor w_zero_point, Tensor? bias, float output_scale, int output_zero_point, "
    "ScalarType? output_dtype, str post_op_name, Scalar?[] post_op_args, "
    "str post_op_algorithm) -> Tensor",
    "qlinear_prepack": "(Tensor weight, int[]? x_shape) -> Tensor",
}
# Attributes and keys that their functions set or read, by function.
IN_SOURCE = {
    "transformers.GenerationMixin._prepare_special_tokens": "_eos_token_tensor _pad_token_tensor",
    "transformers.GenerationConfig.from_model_config": "_from_model_config",
    "transformers.Pipeline.__init__": "_batch_size _forward_params _preprocess_params",
    "transformers.PreTrainedTokenizerFast.__init__": "_add_eos_token _tokenizer",
    "transformers.PreTrainedTokenizerBase.__call__": "_switch_to_input_mode _switch_to_target_mode",
    "transformers.PreTrainedTokenizerBase.__init__": """
        _in_target_context_manager _special_tokens_map
    """,
    "transformers.PreTrainedTokenizerBase.save_pretrained": "_auto_map",
    "transformers.utils.hub.cached_files": "_raise_exceptions_for_missing_entries",
    "datasets.IterableDataset.__init__": "_distributed _ex_iterable",
    "torch.utils.data.get_worker_info": "_worker_info",
    "torch.distributed.fsdp.fully_shard": "_is_fsdp_managed_module",
    "torch.nn.Module._call_impl": """
        _backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks
    """,
    "torch.nn.Module.__getattr__": "_modules",
    "torch._dynamo.OptimizedModule.__init__": "_orig_mod",
    "accelerate.hooks.add_hook_to_module": "_hf_hook",
    "accelerate.Accelerator.prepare_model": "_original_forward",
    "argparse.ArgumentParser.add_argument_group": "_ArgumentGroup",
    "argparse.ArgumentParser.format_usage": "_actions",
    "argparse.ArgumentParser._parse_optional": "_option_string_actions",
}
# Imports from modules below the top level of a package.
IMPORTS = {
    "accelerate.utils": "broadcast_object_list extract_model_from_parallel set_seed str_to_bool",
    "transformers.activations": "ACT2FN",
    "transformers.exporters": "OnnxConfig OnnxExporter",
    "transformers.generation": """
        EosTokenCriteria EpsilonLogitsWarper EtaLogitsWarper ForcedEOSTokenLogitsProcessor
        GenerateBeamDecoderOnlyOutput GenerateBeamEncoderDecoderOutput
        GenerateDecoderOnlyOutput GenerateEncoderDecoderOutput GenerationMode
        LogitNormalization LogitsProcessor LogitsProcessorList MaxLengthCriteria
        MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor MinPLogitsWarper
        NoBadWordsLogitsProcessor PromptLookupCandidateGenerator StoppingCriteria
        StoppingCriteriaList SuppressTokensLogitsProcessor TemperatureLogitsWarper
        TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
    """,
    "transformers.integrations.deepspeed": "is_deepspeed_zero3_enabled unset_hf_deepspeed_config",
    "transformers.masking_utils": "create_bidirectional_mask create_causal_mask",
    "transformers.modeling_layers": "GradientCheckpointingLayer",
    "transformers.modeling_outputs": """
        BaseModelOutput BaseModelOutputWithPastAndCrossAttentions
        CausalLMOutputWithCrossAttentions MaskedLMOutput Seq2SeqLMOutput Seq2SeqModelOutput
        SequenceClassifierOutput TokenClassifierOutput
    """,
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "transformers.models.auto.configuration_auto": "CONFIG_MAPPING",
    "transformers.models.auto.modeling_auto": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "transformers.models.whisper.tokenization_whisper": "LANGUAGES",
    "transformers.processing_utils": "Unpack",
    "transformers.quantizers": "HfQuantizer register_quantization_config register_quantizer",
    "transformers.quantizers.auto": "AUTO_QUANTIZER_MAPPING",
    "transformers.tokenization_utils_tokenizers": "TokenizersBackend",
    "transformers.trainer_pt_utils": """
        LabelSmoother LengthGroupedSampler get_length_grouped_indices
    """,
    "transformers.trainer_callback": "ExportableState",
    "transformers.trainer_utils": "TrainOutput has_length seed_worker",
    "transformers.utils": """
        GENERATION_CONFIG_NAME TransformersKwargs cached_file can_return_tuple extract_commit_hash
        logging
    """,
    "transformers.utils.generic": "merge_with_config_defaults",
    "transformers.utils.output_capturing": "OutputRecorder capture_outputs",
    "transformers.utils.quantization_config": "QuantizationConfigMixin",
}
# Attributes that we set on their objects.
OURS = {"_cache_arguments", "_cache_given", "_limited_by_source"}
# The interface of evaluate.Metric.
EVALUATE = {"_compute", "_info"}
# IPython's documented names for displaying objects.
NOTEBOOKS = {"_repr_html_", "_repr_png_"}
# An attribute that ctypes documents.
CTYPES = {"_fields_"}
# Names that Python, torch and abc define in every class.
MADE = {"_abc_impl", "_backward_cls", "_is_protocol"}


def entries(table):
    """Return the pairs of owner and name in a table."""
    return [
        (owner, name)
        for owner, names in table.items()
        for name in (names if isinstance(names, dict) else names.split())
    ]


def found(path):
    """Return the object of a dotted path."""
    module, names = path, []
    while True:
        try:
            place = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        assert hasattr(place, name), f"{path} is gone: {', '.join(users(name))}"
        place = getattr(place, name)
    return place


def users(name):
    """Return our files that contain a name."""
    return [
        str(path.relative_to(ROOT))
        for path in sources()
        if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))
    ]


def sources():
    return sorted(path for subpackage in SUBPACKAGES for path in (ROOT / subpackage).rglob("*.py"))


def parameters(function):
    """Return the names of a function's parameters, including "cls"."""
    function = getattr(function, "__func__", function)
    return " ".join(inspect.signature(function).parameters)


# The names of the tables exist


@pytest.mark.parametrize(("owner", "name"), entries(METHODS))
def test_a_method_is_there_with_its_parameters(owner, name):
    expected = METHODS[owner][name]
    method = inspect.getattr_static(found(owner), name, None)
    assert method is not None, f"{owner}.{name} is gone: {', '.join(users(name))}"
    now = parameters(method)
    versions = expected if isinstance(expected, tuple) else (expected,)
    assert now in versions, f"{owner}.{name} takes other parameters: {', '.join(users(name))}"


@pytest.mark.parametrize(("owner", "name"), entries(ATTRIBUTES))
def test_an_attribute_is_there(owner, name):
    assert hasattr(found(owner), name), f"{owner}.{name} is gone: {', '.join(users(name))}"


@pytest.mark.parametrize(("name", "schema"), OPERATORS.items(), ids=OPERATORS)
def test_an_operator_of_torch_is_there_with_its_schema(name, schema):
    spaces = {"_": "mkldnn", "q": "onednn", "l": "quantized"}
    space = spaces[name[0]]
    operator = found(f"torch.ops.{space}.{name}")
    now = re.sub(r"^[^(]+|(?<!->) \w+$", "", str(operator.default._schema))
    assert now == schema, f"torch.ops.{space}.{name} has another schema: {', '.join(users(name))}"


@pytest.mark.parametrize(("function", "name"), entries(IN_SOURCE))
def test_a_function_still_speaks_of_an_attribute(function, name):
    source = inspect.getsource(found(function))
    message = f"{function} does not speak of {name} any more: {', '.join(users(name))}"
    assert re.search(rf"\b{name}\b", source), message


@pytest.mark.parametrize(("module", "name"), entries(IMPORTS))
def test_an_import_is_there(module, name):
    found(f"{module}.{name}")


def test_a_name_that_an_upgrade_removes_or_changes_is_told_by_its_name(monkeypatch):
    mixin = found("transformers.GenerationMixin")
    monkeypatch.setattr(mixin, "_sample", lambda self, input_ids: None)
    with pytest.raises(AssertionError, match=r"_sample takes other parameters: generation/"):
        test_a_method_is_there_with_its_parameters("transformers.GenerationMixin", "_sample")
    monkeypatch.delattr(mixin, "_sample")
    with pytest.raises(AssertionError, match=r"Mixin\._sample is gone: generation/gen"):
        test_a_method_is_there_with_its_parameters("transformers.GenerationMixin", "_sample")
    with pytest.raises(AssertionError, match=r"masking_utils\.create_causal_masks is gone"):
        found("transformers.masking_utils.create_causal_masks")


# The tables are complete


def overridden():
    """Return the private names of foreign classes that our classes override: (class, name)."""
    names = set()
    for module in modules():
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            foreign = [base for base in cls.__mro__ if base.__module__.split(".")[0] in PACKAGES]
            for name in vars(cls):
                owner = next((base for base in foreign if name in vars(base)), None)
                if owner and is_private(name) and name not in MADE:
                    names.add((owner, name))
    return names


def modules():
    """Return all modules of the package."""
    scripts = ("examples", "benchmarks", "space", "vaswani")
    for path in sources():
        subpackage = path.parent.name
        if subpackage not in scripts and path.stem != "__main__":
            with contextlib.suppress(ModuleNotFoundError):  # an extra is not installed
                yield importlib.import_module(
                    f"vaswani.{subpackage}.{path.stem}".removesuffix(".__init__")
                )
    yield vaswani


def is_private(name):
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def foreign_attributes(trees):
    """Return private attributes that sources use but do not define. Other packages define them."""
    own = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    used = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            used |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
        elif isinstance(node, ast.Compare) and "vars(" in ast.unparse(node):
            used |= {node.left.value} if isinstance(node.left, ast.Constant) else set()
    return {name for name in used - own if is_private(name)}


def deep_imports(trees):
    """Return imports from modules below the top level, except torch's documented modules."""
    return {
        (node.module, alias.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
        if node.module.startswith(("transformers.", "accelerate.", "peft."))
    }


def members_for_others(trees):
    """Return private members that no source uses. Other packages use them."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    members = set()
    for member in (
        child for node in nodes if isinstance(node, ast.ClassDef) for child in node.body
    ):
        if isinstance(member, ast.FunctionDef):
            members.add(member.name)
        elif isinstance(member, ast.Assign | ast.AnnAssign):
            targets = member.targets if isinstance(member, ast.Assign) else [member.target]
            members |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in members - used if is_private(name)}


@pytest.fixture(scope="module")
def trees():
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sources()]


def test_every_private_name_that_we_override_is_in_a_table():
    listed = [(found(owner), name) for owner, name in entries(METHODS) + entries(ATTRIBUTES)]
    missing = [
        f"{owner.__module__}.{owner.__qualname__}.{name}"
        for owner, name in overridden()
        if not any(
            name == other and inspect.isclass(place) and issubclass(place, owner)
            for place, other in listed
        )
    ]
    assert not missing
    assert "vaswani.training.run" in sys.modules


def test_every_private_name_that_we_use_is_in_a_table(trees):
    listed = {name for table in (METHODS, ATTRIBUTES, IN_SOURCE) for _, name in entries(table)}
    assert foreign_attributes(trees) - listed - set(OPERATORS) - OURS == set()


def test_every_private_member_that_other_code_asks_for_is_in_a_table(trees):
    listed = {name for table in (METHODS, ATTRIBUTES, IN_SOURCE) for _, name in entries(table)}
    assert members_for_others(trees) - listed - EVALUATE - NOTEBOOKS - CTYPES == set()


def test_no_table_holds_a_name_that_nobody_uses(trees):
    for table in (METHODS, ATTRIBUTES, IN_SOURCE):
        for owner, name in entries(table):
            assert users(name), f"{owner}.{name}"
    assert all(users(name) for name in {*OPERATORS, *OURS})


def test_every_import_from_a_module_below_is_in_the_table(trees):
    assert deep_imports(trees) == set(entries(IMPORTS))


def test_private_names_are_seen_in_every_form_of_use():
    source = """
import a
class Own(Foreign):
    def _own(self): self._kept = super()._method(_keyword=1) + self._own()
    def run(self, other): return other._attribute, getattr(other, "_by_name", None), self._kept
    def ask(self, module): return "_by_vars" in vars(module), a.b._function(), module.__dict__
    def set(self, other): other._set_there = 1
"""
    assert foreign_attributes([ast.parse(source)]) == {
        *("_method", "_keyword", "_attribute", "_by_name", "_by_vars", "_function", "_set_there")
    }
    source = (
        "class Own(Foreign):\n  _asked: int = 1\n  def _hook(self): pass\n  def hook(self): pass"
    )
    assert members_for_others([ast.parse(source)]) == {"_asked", "_hook"}
    source = "from transformers.deep.er import one, two\nfrom .own import three\nimport torch.nn"
    assert deep_imports([ast.parse(source)]) == {
        ("transformers.deep.er", "one"),
        ("transformers.deep.er", "two"),
    }
