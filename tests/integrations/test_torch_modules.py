"""PyTorch's modules inside batch_invariant(): a text alone has the bits that it has in a batch, in any memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from support import looped

torch = pytest.importorskip("torch")

from cattn.integrations.torch import batch_invariant, use_cattn  # noqa: E402

nn, F = torch.nn, torch.nn.functional
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTH, HEADS, HIDDEN = 24, 4, 40
Call = Callable[[Any, Any], Any]  # of a module and texts (B, T, WIDTH); the texts come first in the result


class Module(NamedTuple):
    """How a module is made, and how it is called."""

    make: Callable[[], Any]
    call: Call = lambda module, x: module(x)


def tokens_first(call: Call) -> Call:
    return lambda module, x: call(module, x.transpose(0, 1)).transpose(0, 1)


def of_channels(module: Any, x: Any) -> Any:
    return module(x.mT).mT


def of_words(module: Any, x: Any) -> Any:
    return module((x[..., 0] * 2).long() % 9)


def run(module: Any, x: Any) -> Any:
    """Return the output and the last state of a recurrent layer, for each token."""
    out, state = module(x)
    last = torch.cat([s.transpose(0, 1).flatten(1) for s in (state if isinstance(state, tuple) else (state,))], 1)
    tokens_at = 1 if module.batch_first else 0
    return torch.cat([out, last.unsqueeze(tokens_at).expand(*out.shape[:2], -1)], -1)


def run_packed(module: Any, x: Any) -> Any:
    """Return the output of texts of different lengths, of which the caller compares the first tokens."""
    lengths = [max(1, x.shape[1] - 2 * i) for i in range(len(x))]
    out, _ = module(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
    return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0][:, : lengths[-1]]


def run_cell(module: Any, x: Any) -> Any:
    state, outs = None, []
    for token in x.unbind(1):
        state = module(token, state)
        outs.append(torch.cat(state, -1) if isinstance(state, tuple) else state)
    return torch.stack(outs, 1)


def attention(**options: Any) -> Callable[[], Any]:
    return lambda: nn.MultiheadAttention(WIDTH, HEADS, **options)


def layer(kind: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(WIDTH, HEADS, HIDDEN, 0.0, **options)


def transformer(**options: Any) -> Any:
    return nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, 0.0, **options)


def with_memory(module: Any, x: Any) -> Any:
    return module(x, x.flip(-1))


def hidden_keys(x: Any) -> Any:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def of_each_token(module: Any, x: Any) -> Any:
    return torch.stack([torch.stack([module(token) for token in text]) for text in x])


RECURRENT = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
FIRST = {"batch_first": True}
MODULES: dict[str, Module] = {
    "Linear": Module(lambda: nn.Linear(WIDTH, 40)),
    "Linear without bias": Module(lambda: nn.Linear(WIDTH, 40, bias=False)),
    "Linear of vectors": Module(lambda: nn.Linear(WIDTH, 40), of_each_token),
    "Linear of four axes": Module(
        lambda: nn.Linear(6, 7), lambda m, x: m(x.unflatten(-1, (HEADS, -1)).transpose(1, 2)).transpose(1, 2)
    ),
    "LazyLinear": Module(lambda: nn.LazyLinear(40)),
    "Bilinear": Module(lambda: nn.Bilinear(WIDTH, WIDTH, 10), with_memory),
    "Embedding": Module(lambda: nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 30)), of_words),
    "EmbeddingBag": Module(lambda: nn.EmbeddingBag(9, WIDTH), of_words),
    "AdaptiveLogSoftmaxWithLoss": Module(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [5, 10], head_bias=True),
        lambda m, x: m.log_prob(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
    ),
    "MultiheadAttention": Module(attention(**FIRST), lambda m, x: torch.cat(m(x, x, x), -1)),
    "MultiheadAttention, tokens first": Module(attention(), tokens_first(lambda m, x: m(x, x, x)[0])),
    "MultiheadAttention, no weights": Module(attention(**FIRST), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "MultiheadAttention, causal": Module(
        attention(**FIRST), lambda m, x: m(x, x, x, need_weights=False, is_causal=True, attn_mask=hidden_keys(x))[0]
    ),
    "MultiheadAttention, other keys": Module(
        attention(kdim=8, add_bias_kv=True, add_zero_attn=True, **FIRST), lambda m, x: m(x, x[..., :8], x)[0]
    ),
    "TransformerEncoderLayer": Module(layer(nn.TransformerEncoderLayer, **FIRST)),
    "TransformerEncoderLayer, tokens first": Module(
        layer(nn.TransformerEncoderLayer, activation="gelu", norm_first=True), tokens_first(lambda m, x: m(x))
    ),
    "TransformerEncoder": Module(lambda: nn.TransformerEncoder(layer(nn.TransformerEncoderLayer, **FIRST)(), 2)),
    "TransformerDecoderLayer": Module(layer(nn.TransformerDecoderLayer, **FIRST), with_memory),
    "TransformerDecoderLayer, tokens first": Module(layer(nn.TransformerDecoderLayer), tokens_first(with_memory)),
    "TransformerDecoder": Module(
        lambda: nn.TransformerDecoder(layer(nn.TransformerDecoderLayer, **FIRST)(), 2), with_memory
    ),
    "Transformer": Module(lambda: transformer(**FIRST), with_memory),
    "Transformer, tokens first": Module(transformer, tokens_first(with_memory)),
    **{name: Module(lambda kind=kind: kind(WIDTH, 7, **FIRST), run) for name, kind in RECURRENT.items()},
    **{
        f"{name}, tokens first": Module(lambda kind=kind: kind(WIDTH, 7, bias=False), tokens_first(run))
        for name, kind in RECURRENT.items()
    },
    **{
        f"{name}, both directions": Module(lambda kind=kind: kind(WIDTH, 7, 2, bidirectional=True, **FIRST), run)
        for name, kind in RECURRENT.items()
    },
    **{
        f"{name}, packed": Module(lambda kind=kind: kind(WIDTH, 7, **FIRST), run_packed)
        for name, kind in RECURRENT.items()
    },
    "LSTM, proj_size": Module(lambda: nn.LSTM(WIDTH, 7, proj_size=5, bidirectional=True, **FIRST), run),
    "RNN, relu": Module(lambda: nn.RNN(WIDTH, 7, nonlinearity="relu", **FIRST), run),
    "RNNCell": Module(lambda: nn.RNNCell(WIDTH, 7), run_cell),
    "GRUCell": Module(lambda: nn.GRUCell(WIDTH, 7), run_cell),
    "LSTMCell": Module(lambda: nn.LSTMCell(WIDTH, 7), run_cell),
    **{name: Module(getattr(nn, name)) for name in ("GLU", "GELU", "SiLU", "Mish", "ELU", "Tanh", "PReLU")},
    "LayerNorm": Module(lambda: nn.LayerNorm(WIDTH)),
    "RMSNorm": Module(lambda: nn.RMSNorm(WIDTH)),
    "GroupNorm": Module(lambda: nn.GroupNorm(HEADS, WIDTH), of_channels),
    "BatchNorm1d": Module(lambda: nn.BatchNorm1d(WIDTH), of_channels),
    "Conv1d of each channel": Module(lambda: nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH), of_channels),
    "Conv1d of each channel, twice": Module(
        lambda: nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding="same", groups=WIDTH, bias=False), of_channels
    ),
    "Conv1d of each channel, wide padding": Module(
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=5, groups=WIDTH), of_channels
    ),
    "Softmax": Module(lambda: nn.Softmax(1)),
    "AvgPool1d": Module(lambda: nn.AvgPool1d(3, 1, 1), of_channels),
    "CosineSimilarity": Module(lambda: nn.CosineSimilarity(-1), lambda m, x: m(x, x.flip(-1))),
}
REFUSED: dict[str, Module] = {
    "Conv1d": Module(lambda: nn.Conv1d(WIDTH, 7, 1), of_channels),
    "Conv1d of each channel, dilation": Module(
        lambda: nn.Conv1d(WIDTH, WIDTH, 2, dilation=2, groups=WIDTH), of_channels
    ),
    "Conv1d of groups": Module(lambda: nn.Conv1d(WIDTH, WIDTH, 2, groups=2), of_channels),
    "Conv2d": Module(lambda: nn.Conv2d(1, 2, 3), lambda m, x: m(x[:, None])),
    "ConvTranspose1d": Module(lambda: nn.ConvTranspose1d(WIDTH, 7, 1), of_channels),
}
MEMORY: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels before tokens": lambda x: x.mT.contiguous().mT,
    "every other number": lambda x: torch.stack([x, x], -1)[..., 0],
    "a part of longer texts": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}
TEXTS = torch.randn(3, 9, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def made(name: str, dtype: Any, modules: dict[str, Module] = MODULES) -> Callable[[Any], Any]:
    torch.manual_seed(len(name))
    with warnings.catch_warnings(action="ignore"):  # an encoder without a fast path says so
        module = modules[name].make()
    if name.startswith("Lazy"):
        module(TEXTS.float())
    module = module.to(dtype).eval()
    for parameter, numbers in module.named_parameters():
        if "bias" in parameter:  # some are zeros
            nn.init.uniform_(numbers, -1, 1)
    return lambda x: modules[name].call(module, x)


@pytest.mark.promise("projections' bits")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:LSTM with projections is not supported")
@looped("name, dtype", [(name, DTYPES[i % len(DTYPES)]) for i, name in enumerate(MODULES)], ids=str)
def test_a_text_alone_has_the_bits_of_a_batch_in_every_module(name: str, dtype: Any) -> None:
    """Of 1 to 9 tokens; with gradients and without, which are two ways through PyTorch's layers."""
    check_bits(name, dtype)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:LSTM with projections is not supported")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_text_alone_has_the_bits_of_a_batch_in_every_dtype(name: str, dtype: Any) -> None:
    check_bits(name, dtype)


def check_bits(name: str, dtype: Any) -> None:
    function = made(name, dtype)
    for length, gradients in ((1, False), (2, False), (9, False), (9, True)):
        texts = TEXTS[:, :length].to(dtype)
        with torch.set_grad_enabled(gradients), batch_invariant():
            alone = [function(text[None].clone())[0].detach() for text in texts]
            for memory, arrange in MEMORY.items():
                for i, row in enumerate(function(arrange(texts))):
                    assert torch.equal(alone[i][: len(row)], row), (length, gradients, memory, i)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:LSTM with projections is not supported")
@looped("name", MODULES)
def test_the_numbers_of_a_module_are_those_of_pytorch(name: str) -> None:
    function, x = made(name, torch.float32), TEXTS.float().requires_grad_()
    right = function(x)
    wanted = torch.autograd.grad(right.sum(), x, allow_unused=True)[0]
    for block in (batch_invariant, lambda: use_cattn(linear=True)):
        with block():
            found = function(x)
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
            if wanted is not None:
                torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_the_modules_that_are_refused(name: str) -> None:
    function = made(name, torch.float32, REFUSED)
    with batch_invariant(), pytest.raises(NotImplementedError, match=r"no kernel for torch\.ops\.aten\.convolution"):
        function(TEXTS.float())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_attention_of_the_fast_path_counts() -> None:
    function, x = made("TransformerEncoder", torch.float32), TEXTS.float()
    module = nn.TransformerEncoder(layer(nn.TransformerEncoderLayer, **FIRST)(), 2).eval()
    padding = torch.arange(9) >= torch.tensor([9, 6, 2])[:, None]  # becomes a nested tensor
    with torch.inference_mode():
        right = function(x), module(x, src_key_padding_mask=padding)
        with use_cattn() as seen:
            torch.testing.assert_close(function(x), right[0], rtol=1e-4, atol=1e-5)
            assert seen.calls == 2
            torch.testing.assert_close(module(x, src_key_padding_mask=padding), right[1], rtol=1e-4, atol=1e-5)
            assert seen.calls == 2 + 2 * 3
