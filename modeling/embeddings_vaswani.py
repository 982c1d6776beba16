"""The embeddings (section 3.4): where they are, which of them share one matrix, their sizes."""

from typing import Any

from torch import nn

from .parallel_vaswani import DividedModel


class SharedEmbeddings(DividedModel):
    """A model whose embeddings may share their matrix with each other and with `lm_head`."""

    def get_input_embeddings(self) -> nn.Embedding:
        """Return a stack's embedding; of a model with both stacks, the encoder's.

        While FSDP2 shards the layers of such a model: the embedding that shares the matrix of
        `lm_head`. Accelerate puts input embedding and `lm_head` into one group if they share it;
        in two groups, the first forward pass fails.
        """
        base: Any = self.base_model
        if self.config.tie_word_embeddings and _layers_alone_are_sharded(base):
            return base.decoder.embed_tokens
        return _first_stack(base).embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace that embedding, and the decoder's where the two are shared."""
        base: Any = self.base_model
        _first_stack(base).embed_tokens = value
        decoder = getattr(base, "decoder", None)
        if decoder is not None and self._one_table():
            decoder.embed_tokens = value

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie the matrices, and let one embedding serve both stacks where these share it.

        FSDP2 needs every user of a matrix in one group: Accelerate knows of the input embedding
        and of `lm_head`, not of a third one.
        """
        super().tie_weights(*args, **kwargs)
        base: Any = self.base_model
        if not _has_both_stacks(base):
            return
        source, target = base.encoder.embed_tokens, base.decoder.embed_tokens
        # An adapter makes two embeddings of one matrix different.
        plain = type(source) is nn.Embedding and type(target) is nn.Embedding
        if plain and source.weight is target.weight:
            base.decoder.embed_tokens = source
            for model in (self, base):  # one module, one entry in the plan
                model.forget_in_plans("decoder.embed_tokens")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the weights by name; a sharded embedding of both stacks has the encoder's alone.

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
            # A whole state_dict has the second name, with a tensor that is not sharded.
            state_dict[f"{prefix}decoder.embed_tokens.weight"] = source
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _one_table(self) -> bool:
        return self.config.share_encoder_decoder_embeddings and self.config.tie_word_embeddings

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, *args: Any, **kwargs: Any
    ) -> nn.Embedding:
        """Resize the vocabulary: of both sides where they share one, else of the source alone."""
        if not self.config.share_encoder_decoder_embeddings:
            source = self._get_resized_embeddings(
                self.get_input_embeddings(), new_num_tokens, *args, **kwargs
            )
            self.set_input_embeddings(source)
            return source
        embeddings = super()._resize_token_embeddings(new_num_tokens, *args, **kwargs)
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and not self._one_table():
            decoder.embed_tokens = self._get_resized_embeddings(
                decoder.embed_tokens, embeddings.num_embeddings
            )
        return embeddings


def _first_stack(base: Any) -> Any:
    """Return the encoder; the decoder where it is alone; a model that is a stack itself."""
    return getattr(base, "encoder", getattr(base, "decoder", base))


def _has_both_stacks(module: Any) -> bool:
    return hasattr(module, "encoder") and hasattr(module, "decoder")


def _has_one_sharded_embedding(module: Any) -> bool:
    """Whether two stacks inside `module` use one embedding whose matrix is a DTensor."""
    if not _has_both_stacks(module):
        return False
    source, target = module.encoder.embed_tokens, module.decoder.embed_tokens
    return source is target and hasattr(source.weight, "device_mesh")


def _layers_alone_are_sharded(base: Any) -> bool:
    """Whether FSDP2 has sharded the layers of both stacks, and not yet what holds them."""
    if not _has_both_stacks(base):
        return False
    return _is_sharded(base.decoder.layers[0]) and not _is_sharded(base)


def _is_sharded(module: nn.Module) -> bool:
    return getattr(module, "_is_fsdp_managed_module", False)
