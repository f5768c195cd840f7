"""A recipe as `drafthead train` would run it."""

from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from drafthead.data.utils.errors import UserError
from drafthead.train.config import RunConfig, parse_run


def composed(overrides: Sequence[str]) -> RunConfig:
    """The checked settings that `drafthead train` would run with.

    Raises:
        UserError: no such recipe or setting.
    """
    try:
        with initialize_config_module("drafthead.recipes", version_base="1.3"):
            return parse_run(compose("train", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{overrides[0]}: {str(error).splitlines()[0]}") from None
