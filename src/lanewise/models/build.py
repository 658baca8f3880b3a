"""From a model's settings to the model."""

from lanewise.config import DeepSeekModel, DenseModel
from lanewise.models.base import LanguageModel
from lanewise.models.deepseek import DeepSeek
from lanewise.models.dense import Dense


def build(config: DenseModel | DeepSeekModel) -> LanguageModel:
    """The model on the current default device, its parameters uninitialised (`init.fill` gives them values), so that
    `with torch.device("meta"): build(config)` costs nothing at any size."""
    return Dense(config) if isinstance(config, DenseModel) else DeepSeek(config)
