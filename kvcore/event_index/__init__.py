# SPDX-License-Identifier: Apache-2.0
"""Cache events between processes: the numbered batches of an engine, and an index of what each has
cached.
"""

from kvcore.event_index.dynamo import DynamoForm
from kvcore.event_index.errors import DamagedEvents
from kvcore.event_index.event_log import EventLog, Message
from kvcore.event_index.index import Applied, EventIndex, Gap, Stale
from kvcore.event_index.wire import EventBatch, decode_events

__all__ = [
    "Applied",
    "DamagedEvents",
    "DynamoForm",
    "EventBatch",
    "EventIndex",
    "EventLog",
    "Gap",
    "Message",
    "Stale",
    "decode_events",
]
