"""The configuration of a run: sections, files, command line, and the rules that a layout must keep."""

from megalite.config.check import check
from megalite.config.load import from_dict, load_config, save_config, to_dict
from megalite.config.sections import SECTIONS, Config, ConfigError

__all__ = ["SECTIONS", "Config", "ConfigError", "check", "from_dict", "load_config", "save_config", "to_dict"]
