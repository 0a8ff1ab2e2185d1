import importlib
import inspect

import pytest

NEEDED = inspect.Parameter.empty
COMMON = {"dropout": 0.1, "max_seq_len": 2048, "pooling": "cls", "activation": "gelu"}
COMMON |= {"use_expression_values": True, "layer_norm_eps": 1e-12}
SIZES = {"vocab_size": NEEDED, "hidden_dim": NEEDED}
FORWARD = {"input_ids": NEEDED, "attention_mask": NEEDED, "values": None, "labels": None}
HIDDEN = {"hidden_states": NEEDED, "attention_mask": None}

SIGNATURES = {
    "models.ModelOutput": dict.fromkeys(["loss", "logits", "embeddings", "hidden_states"]),
    "models.TransformerEncoder": {**SIZES, "num_layers": NEEDED, "num_heads": NEEDED, "ffn_dim": None, **COMMON},
    "models.AutoregressiveTransformer": {
        **{"vocab_size": NEEDED, "n_bins": 51, "hidden_dim": 512, "num_layers": 12, "num_heads": 8, "ffn_dim": None},
        **COMMON,
        **{"gene_loss_weight": 1.0, "expression_loss_weight": 1.0},
    },
    "models.MaskedAutoencoder": {
        **{"vocab_size": NEEDED, "encoder_dim": 512, "decoder_dim": None, "encoder_layers": 12, "decoder_layers": 4},
        **{"encoder_heads": 8, "decoder_heads": None, "ffn_dim": None},
        **COMMON,
        "pooling": "mean",
    },
    "models.gene_pooling.GenePoolingModel": {**SIZES, "num_layers": 2, "dropout": 0.1, "max_seq_len": 2048},
    "models.components.GeneExpressionEmbedding": {
        **SIZES,
        **{"max_seq_len": 2048, "dropout": 0.1, "use_expression_values": True, "layer_norm_eps": 1e-12},
    },
    "models.components.GeneExpressionEmbedding.forward": {"input_ids": NEEDED, "values": None},
    "models.components.MaskedGenePredictionHead": {"hidden_dim": NEEDED, "vocab_size": NEEDED, "layer_norm_eps": 1e-12},
    "models.components.BinPredictionHead": {"hidden_dim": NEEDED, "n_bins": NEEDED, "layer_norm_eps": 1e-12},
    "models.components.ExpressionPredictionHead": {"hidden_dim": NEEDED},
    "models.components.cls_pool": HIDDEN,
    "models.components.mean_pool": HIDDEN,
    "models.components.generate_causal_mask": {"seq_len": NEEDED, "device": None},
    "models.register_model": {"name": NEEDED},
    "models.get_model": {"name": NEEDED, "config": NEEDED},
    "models.list_models": {},
    "models.init_weights": {"module": NEEDED},
    "models.count_parameters": {"model": NEEDED},
    # The paths of the tutorial.
    "models._utils.count_parameters": {"model": NEEDED},
    "models._utils.init_weights": {"module": NEEDED},
    "models.components.attention.generate_causal_mask": {"seq_len": NEEDED, "device": None},
    "models.components.embeddings.GeneExpressionEmbedding": SIZES,
    "models.components.heads.BinPredictionHead": {"hidden_dim": NEEDED, "n_bins": NEEDED},
    "models.components.heads.ExpressionPredictionHead": {"hidden_dim": NEEDED},
    "models.components.heads.MaskedGenePredictionHead": {"hidden_dim": NEEDED, "vocab_size": NEEDED},
    "models.components.pooling.cls_pool": HIDDEN,
    "models.components.pooling.mean_pool": HIDDEN,
    "models.protocol.ModelOutput": {"loss": None},
    "models.registry.register_model": {"name": NEEDED},
}
for architecture in ("TransformerEncoder", "AutoregressiveTransformer", "MaskedAutoencoder", "GenePoolingModel"):
    SIGNATURES[f"models.{architecture}.forward"] = FORWARD
    SIGNATURES[f"models.{architecture}.encode"] = {name: FORWARD[name] for name in list(FORWARD)[:3]}
    SIGNATURES[f"models.{architecture}.from_config"] = {"config": NEEDED}
    SIGNATURES[f"models.{architecture}.num_parameters"] = {}


def found(path: str) -> object:
    parts, rest = ["scforge", *path.split(".")], []
    while True:
        try:
            value = importlib.import_module(".".join(parts))
            break
        except ModuleNotFoundError:
            rest.insert(0, parts.pop())
    for name in rest:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_and_defaults(path):
    parameters = [p for p in inspect.signature(found(path)).parameters.values() if p.name != "self"]
    # Further options may follow.
    given = {p.name: p.default for p in parameters[: len(SIGNATURES[path])]}
    assert given == SIGNATURES[path]
    assert list(given) == list(SIGNATURES[path])
    if path.endswith(("num_parameters", "models.count_parameters")):
        assert parameters[-1].name == "trainable_only"
        assert parameters[-1].default is True
    if path.endswith((".forward", ".encode")) and "components" not in path:
        assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
