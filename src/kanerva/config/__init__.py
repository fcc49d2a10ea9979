"""Every option of every model and run, with its default. Needs no torch, so `--help` is quick."""

# Star imports: every class in these modules is public.
from kanerva.config.groups import *  # noqa: F403
from kanerva.config.models import *  # noqa: F403
from kanerva.config.parsing import coerce as coerce
from kanerva.config.parsing import model_from_dict as model_from_dict
from kanerva.config.parsing import option_groups as option_groups
from kanerva.config.parsing import option_names as option_names
from kanerva.config.parsing import run_from_dict as run_from_dict
from kanerva.config.parsing import unknown_option as unknown_option
from kanerva.config.plain import flatten as flatten
from kanerva.config.plain import to_dict as to_dict
from kanerva.config.run import *  # noqa: F403
