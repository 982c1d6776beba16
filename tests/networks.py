"""Networks and tensors that several test files compare."""

import torch

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SINUSOIDS = ["sinusoidal", "sinusoidal_concat", "sinusoidal_t2t"]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def outputs_of(sequences, eos=2, pad=None):
    """Remove the start token, tokens after the end token, and padding."""
    rows = []
    for row in sequences.tolist():
        output = row[1 : row.index(eos, 1) + 1] if eos in row[1:] else row[1:]
        while output and output[-1] == pad:
            output.pop()
        rows.append(output)
    return rows


def enliven(model):
    """Give a model with an untied `lm_head` outputs that vary in words and length.

    Random maps repeat one word for ever. Here the vector of each word is a whitened state of the
    decoder, so that every word is likely at some positions and unlikely at others. Small embeddings
    give positions an effect. The end token has the mean state of the fifth position.
    """
    config, head = model.config, model.lm_head.weight
    source = torch.randint(0, config.vocab_size, (8, 5))
    target = torch.randint(0, config.vocab_size, (8, 12))
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.mul_(0.25)
        states = model.model(source, decoder_input_ids=target).last_hidden_state
        model.model.decoder.layers[-1].final_layer_norm.bias.sub_(states.mean(dim=(0, 1)))
        states = states - states.mean(dim=(0, 1))
        every_state = states.flatten(0, 1)
        covariance = every_state.T @ every_state / len(every_state) + 1e-3 * torch.eye(
            config.d_model
        )
        visited = every_state[torch.randperm(len(every_state))[: len(head)]]
        visited[config.eos_token_id] = 2 * states[:, 4].mean(dim=0)
        head.copy_(0.4 * visited @ torch.linalg.inv(covariance))
    return model
