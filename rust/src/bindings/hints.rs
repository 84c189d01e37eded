// SPDX-License-Identifier: Apache-2.0
//! The names of the types of arguments and results in the generated stub.

use pyo3::inspect::{PyStaticConstant, PyStaticExpr};
use pyo3::{type_hint_identifier, type_hint_subscript, type_hint_union};

const NONE: PyStaticExpr = PyStaticExpr::Constant { value: PyStaticConstant::None };
const ELLIPSIS: PyStaticExpr = PyStaticExpr::Constant { value: PyStaticConstant::Ellipsis };
const TUPLE: PyStaticExpr = type_hint_identifier!("builtins", "tuple");
const REFUSED: PyStaticExpr = type_hint_identifier!("kvcore.types.values", "Refused");

pub(crate) const ANY: PyStaticExpr = type_hint_identifier!("typing", "Any");
pub(crate) const BOOL: PyStaticExpr = type_hint_identifier!("builtins", "bool");
pub(crate) const INT: PyStaticExpr = type_hint_identifier!("builtins", "int");
pub(crate) const STR: PyStaticExpr = type_hint_identifier!("builtins", "str");
pub(crate) const CONFIG: PyStaticExpr = type_hint_identifier!("kvcore.types.config", "Config");
pub(crate) const REQUEST: PyStaticExpr = type_hint_identifier!("kvcore.types.values", "Request");
pub(crate) const RETENTION: PyStaticExpr =
    type_hint_identifier!("kvcore.types.retention", "KvCacheRetentionConfig");
pub(crate) const IDS: PyStaticExpr = type_hint_subscript!(
    type_hint_identifier!("collections.abc", "Iterable"),
    type_hint_identifier!("builtins", "str")
);
pub(crate) const BLOCK_IDS: PyStaticExpr = type_hint_subscript!(
    type_hint_identifier!("collections.abc", "Iterable"),
    type_hint_identifier!("builtins", "int")
);
pub(crate) const HIT: PyStaticExpr = type_hint_identifier!("kvcore.types.values", "Hit");
pub(crate) const MAYBE_HIT: PyStaticExpr = type_hint_union!(HIT, NONE);
pub(crate) const BLOCKS: PyStaticExpr =
    type_hint_identifier!("kvcore.types.values", "KVCacheBlocks");
pub(crate) const BLOCKS_OR_REFUSED: PyStaticExpr = type_hint_union!(BLOCKS, REFUSED);
pub(crate) const SWAPPED_OR_REFUSED: PyStaticExpr =
    type_hint_union!(type_hint_identifier!("kvcore.types.values", "Swapped"), REFUSED);
pub(crate) const VERDICT: PyStaticExpr = type_hint_identifier!("kvcore.types.values", "Verdict");
pub(crate) const STATUS: PyStaticExpr = type_hint_identifier!("kvcore.types.values", "Status");
pub(crate) const APPENDED: PyStaticExpr = type_hint_identifier!("kvcore.types.values", "Appended");
pub(crate) const STATS: PyStaticExpr =
    type_hint_identifier!("kvcore.types.values", "PrefixCacheStats");
pub(crate) const BATCH: PyStaticExpr = type_hint_identifier!("kvcore.types.commands", "Batch");
pub(crate) const EVENTS: PyStaticExpr = type_hint_identifier!("kvcore.types.event_log", "Events");
pub(crate) const NUMBERS: PyStaticExpr = type_hint_subscript!(TUPLE, INT, ELLIPSIS);
pub(crate) const NAMES: PyStaticExpr = type_hint_subscript!(TUPLE, STR, ELLIPSIS);
pub(crate) const TAKEN: PyStaticExpr = type_hint_union!(NUMBERS, REFUSED);
pub(crate) const COPIED: PyStaticExpr = type_hint_union!(INT, REFUSED);
pub(crate) const COPIES: PyStaticExpr = type_hint_union!(
    type_hint_subscript!(type_hint_identifier!("builtins", "dict"), INT, INT),
    REFUSED
);
pub(crate) const GROWN: PyStaticExpr = type_hint_union!(INT, REFUSED, NONE);
const BYTES: PyStaticExpr = type_hint_identifier!("builtins", "bytes");
const KEYS_OF_GROUP: PyStaticExpr = type_hint_subscript!(TUPLE, BYTES, ELLIPSIS);
pub(crate) const KEYS: PyStaticExpr = type_hint_subscript!(TUPLE, KEYS_OF_GROUP, ELLIPSIS);
pub(crate) const HASHES: PyStaticExpr =
    type_hint_subscript!(type_hint_identifier!("collections.abc", "Iterable"), BYTES);
