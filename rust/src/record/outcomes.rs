// SPDX-License-Identifier: Apache-2.0
//! What came of a call, in a record: done, refused, or the number of its misuse.
//!
//! 0: done; then the row of a request that was added or forked, the number of an epoch, the length
//! of a hit or a pin, whether a reset was done, the checksum of a batch's columns and keys. 1, 2:
//! refused, later or never; then how far an append came, blocks needed, available, pending. 3 and
//! more: misuse, by its place in ERRORS. 255: another exception. An error keeps its place.
//! Twin: kvcore/record/outcomes.py.

use crate::record::checksum::crc32c;
use crate::record::pen::Pen;
use crate::types::commands::Batch;
use crate::types::errors::Error;
use crate::types::event_log::EventLog;
use crate::types::ids::{BlockId, Row};
use crate::types::values::{
    Admitted, Appended, Hit, KVCacheBlocks, PrefixCacheStats, Reason, Refused, Swapped,
};

const ERRORS: [&str; 60] = [
    "UnknownRequest",
    "UnknownRow",
    "RepeatedRequest",
    "EmptyRequestId",
    "EmptyTokens",
    "InvalidToken",
    "LengthMismatch",
    "InvalidCount",
    "TooManyTokens",
    "BeyondModelLength",
    "BeyondComputed",
    "BeforeOpenBatch",
    "WrongBlockHashes",
    "DraftsPending",
    "PlaceholdersPending",
    "NotComputed",
    "StaleOutput",
    "OutputOutOfOrder",
    "BatchNotTaken",
    "BeyondDrafts",
    "InOpenBatch",
    "TooManyInFlight",
    "NotInFlight",
    "BatchOutOfOrder",
    "LoadUnfinished",
    "LoadUnconfirmed",
    "WrongLoad",
    "NotPublished",
    "UnknownOperation",
    "HeldByOthers",
    "NoEncoderGroup",
    "BeyondRequest",
    "HitsOnRunningRequest",
    "WrongHit",
    "StaleHits",
    "CachingDisabled",
    "SwappedOut",
    "NotSwapped",
    "NotRunning",
    "StillHoldsBlocks",
    "HitInOpenBatch",
    "NoHostTier",
    "UnknownBlock",
    "NotPinned",
    "UnusedBlock",
    "InvalidExtraKey",
    "UnsortedMedia",
    "CountMismatch",
    "EpochWentBack",
    "StaleRequest",
    "PolicyFailed",
    "TimeWentBack",
    "EmptyPinName",
    "UnknownPin",
    "RepeatedPin",
    "NothingToPin",
    "TooManyPinned",
    "TooManyDrafts",
    "NoStateGroup",
    "UnalignedCheckpoint",
];
/// The name of the misuse that a token below 0 is, which the bindings raise themselves.
pub(crate) const INVALID_TOKEN: &str = "InvalidToken";
const DONE: u8 = 0;
const LATER: u8 = 1;
const NEVER: u8 = 2;
const FIRST_ERROR: u8 = 3;
const OTHER: u8 = 255;

/// What a record has of an outcome.
pub(crate) trait Outcome {
    /// Write it.
    fn write(&self, out: &mut Pen<'_>) {
        out.put(DONE);
    }

    /// The hit that a look-up found.
    fn hit(&self) -> Option<&Hit> {
        None
    }

    /// The row of a request that was added.
    fn row(&self) -> Option<u32> {
        None
    }
}

impl Outcome for () {}
impl Outcome for Vec<u32> {}
impl Outcome for Vec<String> {}
impl Outcome for Vec<BlockId> {}
impl Outcome for EventLog {}
impl Outcome for PrefixCacheStats {}
impl Outcome for KVCacheBlocks {}
impl Outcome for Swapped {}

impl Outcome for Row {
    fn write(&self, out: &mut Pen<'_>) {
        out.put(DONE);
        out.put_varint(self.0.into());
    }

    fn row(&self) -> Option<u32> {
        Some(self.0)
    }
}

impl Outcome for u32 {
    fn write(&self, out: &mut Pen<'_>) {
        out.put(DONE);
        out.put_varint((*self).into());
    }
}

impl Outcome for bool {
    fn write(&self, out: &mut Pen<'_>) {
        out.put_all(&[DONE, u8::from(*self)]);
    }
}

impl Outcome for Hit {
    fn write(&self, out: &mut Pen<'_>) {
        out.put(DONE);
        out.put_varint(self.num_tokens.into());
    }

    fn hit(&self) -> Option<&Hit> {
        Some(self)
    }
}

impl Outcome for &Batch {
    fn write(&self, out: &mut Pen<'_>) {
        let parts = [self.buffer.as_flattened(), &self.keys];
        let filled = parts.into_iter().filter(|part| !part.is_empty()); // in most steps none
        out.put(DONE);
        out.put_all(&filled.fold(0, crc32c).to_le_bytes());
    }
}

impl<T: Outcome> Outcome for Admitted<T> {
    fn write(&self, out: &mut Pen<'_>) {
        match self {
            Ok(value) => value.write(out),
            Err(refused) => put_refusal(out, refused, None),
        }
    }
}

/// How far an append came, and the places that it set.
impl Outcome for (Appended, Vec<[u32; 4]>) {
    fn write(&self, out: &mut Pen<'_>) {
        match &self.0.refused {
            None => out.put(DONE),
            Some(refused) => put_refusal(out, refused, Some(self.0.done)),
        }
    }
}

fn put_refusal(out: &mut Pen<'_>, refused: &Refused, done: Option<u64>) {
    out.put(if refused.reason == Reason::Later { LATER } else { NEVER });
    if let Some(done) = done {
        out.put_varint(done);
    }
    out.put_varint(refused.needed);
    out.put_varint(refused.available);
    out.put_varint(refused.pending);
}

/// Write a misuse by its name.
pub(crate) fn put_error(out: &mut Pen<'_>, name: &str) {
    let place = ERRORS.iter().position(|each| *each == name);
    out.put(place.map_or(OTHER, |place| FIRST_ERROR + place as u8));
}

/// An error that has a number.
pub(crate) trait Named {
    /// Its name.
    fn error_name(&self) -> &'static str;
}

impl Named for Error {
    fn error_name(&self) -> &'static str {
        self.name()
    }
}
