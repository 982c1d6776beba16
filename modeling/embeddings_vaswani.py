"""Embeddings (section 3.4): access, tying and resizing."""

from typing import Any

from torch import nn

from .parallel_vaswani import DividedModel


class SharedEmbeddings(DividedModel):
    """A model whose embeddings may share their matrix with each other and with `lm_head`."""

    @property
    def _stacks(self) -> Any:
        """The model with `encoder` and `decoder`, or a single stack."""
        return self.base_model

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of a stack, or of the encoder if there are both stacks.

        While FSDP2 shards the layers, return the embedding that shares its matrix with `lm_head`.
        Accelerate puts the input embedding and `lm_head` into one group if they share a matrix.
        With two groups, the first forward pass would fail.
        """
        base = self._stacks
        if self.config.tie_word_embeddings and _layers_alone_are_sharded(base):
            return base.decoder.embed_tokens
        return _first_stack(base).embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the input embedding, and the decoder's if the two are shared."""
        base = self._stacks
        _first_stack(base).embed_tokens = value
        decoder = getattr(base, "decoder", None)
        if decoder is not None and self._shares_embeddings():
            decoder.embed_tokens = value

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie the matrices, and use one embedding in both stacks if they share its matrix.

        FSDP2 needs all users of a matrix in one group. Accelerate looks at the input embedding and
        at `lm_head` only, so a third module with the same matrix would be missed.
        """
        super().tie_weights(*args, **kwargs)
        base = self._stacks
        if not _has_both_stacks(base):
            return
        source, target = base.encoder.embed_tokens, base.decoder.embed_tokens
        # Adapters may change two embeddings of one matrix in different ways.
        without_adapters = type(source) is nn.Embedding and type(target) is nn.Embedding
        if without_adapters and source.weight is target.weight:
            base.decoder.embed_tokens = source
            for model in (self, base):  # a module must have one entry in the plan
                model.forget_in_plans("decoder.embed_tokens")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the weights by name; leave out the second name of a sharded embedding.

        torch's distributed checkpoints visit a module once, and fail at a second name.
        """
        weights = super().state_dict(*args, **kwargs)
        if _has_one_sharded_embedding(self):
            weights.pop(f"{kwargs.get('prefix', '')}decoder.embed_tokens.weight", None)
        return weights

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        source = state_dict.get(f"{prefix}encoder.embed_tokens.weight")
        if _has_one_sharded_embedding(self) and source is not None:
            # A state_dict that is not sharded has the second name too, with a whole tensor.
            state_dict[f"{prefix}decoder.embed_tokens.weight"] = source
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _shares_embeddings(self) -> bool:
        return self.config.share_encoder_decoder_embeddings and self.config.tie_word_embeddings

    def _resize_token_embeddings(
        self,
        new_num_tokens: int | None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize a shared vocabulary, or the vocabulary of the source."""
        if not self.config.share_encoder_decoder_embeddings:
            source = self._get_resized_embeddings(
                self.get_input_embeddings(), new_num_tokens, pad_to_multiple_of, mean_resizing
            )
            self.set_input_embeddings(source)
            return source
        embeddings = super()._resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and not self._shares_embeddings():
            decoder.embed_tokens = self._get_resized_embeddings(
                decoder.embed_tokens, embeddings.num_embeddings, mean_resizing=mean_resizing
            )
        return embeddings


class TargetVocabulary:
    """A translation model whose target may have a vocabulary of its own."""

    config: Any
    model: Any
    lm_head: nn.Linear
    tie_weights: Any
    _get_resized_embeddings: Any
    _get_resized_lm_head: Any

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None
    ) -> nn.Embedding:
        """Resize a separate target vocabulary.

        Raises:
            ValueError: source and target share one vocabulary.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "Source and target share one embedding (share_encoder_decoder_embeddings=True): "
                "call resize_token_embeddings, which resizes both."
            )
        decoder = self.model.decoder
        decoder.embed_tokens = self._get_resized_embeddings(
            decoder.embed_tokens, new_num_tokens, pad_to_multiple_of
        )
        size = decoder.embed_tokens.num_embeddings
        self.lm_head = self._get_resized_lm_head(self.lm_head, size)
        self.config.decoder_vocab_size = size
        self.tie_weights()
        return decoder.embed_tokens


def _first_stack(base: Any) -> Any:
    """Return the encoder, the decoder of a model without encoder, or the model if it is a stack."""
    return getattr(base, "encoder", getattr(base, "decoder", base))


def _has_both_stacks(module: Any) -> bool:
    return hasattr(module, "encoder") and hasattr(module, "decoder")


def _has_one_sharded_embedding(module: Any) -> bool:
    """Tell whether both stacks of `module` use one embedding whose matrix is a DTensor."""
    if not _has_both_stacks(module):
        return False
    source, target = module.encoder.embed_tokens, module.decoder.embed_tokens
    return source is target and hasattr(source.weight, "device_mesh")


def _layers_alone_are_sharded(base: Any) -> bool:
    """Tell whether FSDP2 has sharded the layers of both stacks, but not yet the whole model."""
    if not _has_both_stacks(base):
        return False
    return _is_sharded(base.decoder.layers[0]) and not _is_sharded(base)


def _is_sharded(module: nn.Module) -> bool:
    return getattr(module, "_is_fsdp_managed_module", False)
