"""Open the tokenizer of a model's directory, if the packages that read it are installed.

An engine's worker always has these packages (``engines.build_engine``). A command that checks a model for another
machine may lack them. So nothing is imported here before it is known to be there. ``engines.not_checked`` returns the
message for people.
"""

from typing import TYPE_CHECKING

from model_worker.engines.model_dir import ModelDir
from protocol.process.worker_spec import READ_TOKENIZERS, not_installed

if TYPE_CHECKING:
    from model_worker.engines.tokenizer import Tokenizer


def open_tokenizer(directory: ModelDir) -> "Tokenizer | None":
    """Return the tokenizer, with the chat template; None without the packages. Raises LoadError if either cannot be
    read."""
    if not_installed(READ_TOKENIZERS):
        return None
    from model_worker.engines.tokenizer import Tokenizer

    return Tokenizer(directory)


def open_vocabulary(directory: ModelDir) -> dict[str, int] | None:
    """Return the ids by token, without tokens added for control: models of one family name them differently.

    None without the packages. Raises LoadError for a tokenizer.json that cannot be read.
    """
    if not_installed(READ_TOKENIZERS):
        return None
    from model_worker.engines.tokenizer import read_library

    return dict(read_library(directory).get_vocab(with_added_tokens=False))
