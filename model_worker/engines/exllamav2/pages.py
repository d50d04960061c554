"""Pages of ExLlamaV2's cache: naming a full one, and giving one back, with the repairs that ``job`` lists.

Importing this module imports exllamav2, so ``exllamav2.load`` must have imported the package before.
"""

from typing import Any

from exllamav2.generator.dynamic import _tensor_hash_checksum

from protocol.process.worker_spec import PAGE_TOKENS


def complete_page(generator: Any, sequence: Any) -> None:
    """Name a full page by its tokens and all tokens before them, so that other jobs can use it. Begin the next
    page.

    The package does this, too, but fails an assertion if another job holds a page of that name that is not computed
    yet. In that case this job keeps its own page.
    """
    index = sequence.kv_position // PAGE_TOKENS - 1
    page = sequence.allocated_pages[index]
    before = sequence.allocated_pages[index - 1].phash if index else None
    name = _tensor_hash_checksum(
        sequence.sequence_ids.torch_slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS), before
    )
    same = generator.referenced_pages.get(name)
    if same is None:
        if name in generator.unreferenced_pages:
            generator.unreferenced_pages[name].clear()
        page.update_hash(name)
    elif same.kv_position == PAGE_TOKENS:
        serial = page.access_serial
        release(page)
        sequence.allocated_pages[index] = same
        sequence.block_index_tensor = None
        same.add_ref(serial)
    following = sequence.allocated_pages[index + 1]
    following.prev_hash = sequence.allocated_pages[index].phash
    following.can_revert = False


def release(page: Any) -> None:
    """Give back one reference to a page.

    If another page has taken this page's name, the package renames this page as if it began a text. Then this page is
    marked as empty, so that no prompt finds it by its tokens.
    """
    name = page.phash_revert if page.can_revert else page.phash
    page.sub_ref()
    if not page.ref_count and page.phash != name:
        page.kv_position = 0
