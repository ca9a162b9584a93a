# SPDX-License-Identifier: Apache-2.0
"""Several ranks, one checkpoint that all of them have or none.

The protocol (:mod:`.member` and :mod:`.coordinator`, with :mod:`.view`, :mod:`.schedule` and :mod:`.restore`) is pure:
messages in, actions out. An engine, a simulator and the explorer of the tests run the same code. :class:`Place` reads
checkpoints without an engine, of one process and of a group alike. It may import: tuning and the rooms below.
"""

from pccheck_async.group.control import Address, Meeting, reach
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.folder import (
    domain_of,
    drop_checkpoints,
    mark_rejected,
    parts_of,
    record_of,
    seen_store,
    seen_stores,
    stored_domain,
    write_parts,
)
from pccheck_async.group.group import Group
from pccheck_async.group.member import Member
from pccheck_async.group.memory_place import check_read_tier, open_tier, read_memory_place
from pccheck_async.group.messages import decode_decision, decode_message, encode
from pccheck_async.group.parts import Applied, Key, Part, Run, SeenStore, link_to, members_digest
from pccheck_async.group.place import Place, chunk_pool, open_folder, open_place, read_place
from pccheck_async.group.ranks import Ranks
from pccheck_async.group.schedule import LeadSchedule, Schedule, Verdict
from pccheck_async.group.view import Complete, Incomplete, View, parts_by_key, pinned_keys, ranks_there, view_of

__all__ = [
    "Address",
    "Applied",
    "Complete",
    "Coordinator",
    "Group",
    "Incomplete",
    "Key",
    "LeadSchedule",
    "Meeting",
    "Member",
    "Part",
    "Place",
    "Ranks",
    "Run",
    "Schedule",
    "SeenStore",
    "Verdict",
    "View",
    "check_read_tier",
    "chunk_pool",
    "decode_decision",
    "decode_message",
    "domain_of",
    "drop_checkpoints",
    "encode",
    "link_to",
    "mark_rejected",
    "members_digest",
    "open_folder",
    "open_place",
    "open_tier",
    "parts_by_key",
    "parts_of",
    "pinned_keys",
    "ranks_there",
    "reach",
    "read_memory_place",
    "read_place",
    "record_of",
    "seen_store",
    "seen_stores",
    "stored_domain",
    "view_of",
    "write_parts",
]  # fmt: skip
