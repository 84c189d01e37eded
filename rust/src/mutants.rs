// SPDX-License-Identifier: Apache-2.0
//! Seeded bugs of the twin's own code: the checker must find each (`tools/twin_mutants.py`).
//!
//! Invariants: one bug at a time, in one thread, behind the feature `mutants`. Without the feature
//! `seeded` is false at compile time, so none of this is in a wheel. Only rules for which the twin
//! has code of its own are here: the bugs of rules that both languages share are seeded in Python
//! (`kvcore/check/mutants`). A seeded bug in a transition is a branch of one line.

macro_rules! mutants {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A seeded bug. Numbers are rows of `kvcore/check/mutants/catalogue.py`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Mutant {
            $($(#[$doc])* $name,)*
        }

        /// All of them, by name.
        #[cfg(feature = "mutants")]
        pub(crate) const MUTANTS: &[(&str, Mutant)] = &[$((stringify!($name), Mutant::$name)),*];
    };
}

mutants! {
    /// 23: a block is handed out without an owner.
    AllocRef0,
    /// 21: a block that is hit stays in the free queue.
    TouchNotDequeued,
    /// 1, 2: an evicted block stays findable.
    EvictKeepsIndex,
    /// 4: evicting one copy forgets all others of its content.
    EvictDropsDups,
    /// Keys that share a bucket and a tag are taken for one, and tags have no bits.
    IndexComparesBuckets,
    /// 5: each copy that goes is announced as the last one.
    EventPerCopy,
    /// 27: the counter of the free queue misses what leaves.
    CounterDrifts,
    /// 28: a released block does not return to the free queue.
    FreeForgetsABlock,
    /// 53: a table is given back from its head.
    FreeHeadFirst,
    /// 49: the worker is not told that a table was cut.
    CutNotReported,
    /// 41: the copy of a block that is written is not made.
    CowNoCopy,
    /// 41: a shared block is written in place.
    SharedWrittenInPlace,
    /// 43: a keyed block is written in place and keeps its key.
    KeyedWrittenInPlace,
    /// 41: a request that was forked still grows as if it had its last block alone.
    ForkKeepsQuiet,
    /// A token that changes counts alone is scheduled and not counted.
    QuietStepNotCounted,
    /// Of the tables that a token begins a block in, only the first one grows.
    EndsGrowOneTable,
    /// A token that changes counts alone is scheduled, and its output not awaited.
    QuietStepNotAwaited,
    /// With keys on completion, a token that comes gives no key to a block that was skipped.
    QuietStepKeysNothing,
    /// Slots before rejected positions are written as they are, whoever shares them by then.
    RejectionKeepsSlots,
    /// 16: hits in the free queue cost no capacity.
    HitsCostNothing,
    /// 37: full blocks are published though they are not yet computed.
    CacheWholePrompt,
    /// 39: a hit leaves no token to compute.
    FullHit,
    /// 54: the cache is reset while blocks are used.
    ResetInUse,
    /// 72: keys of the open batch stay when a request leaves it.
    LeavingKeepsKeys,
    /// 7: a cut request keeps its hashes.
    TruncateKeepsHashes,
    /// 32: a merged table still names the block that it let go.
    MergeNoRemap,
    /// 49: the worker is not told what fell behind a window.
    TrimNotReported,
    /// The next record of the open batch is looked for in the place of the one that left.
    RowMapKeepsPlace,
    /// Of what a request published in the open batch, only the first key is withdrawn.
    ChainLosesKeys,
    /// A request that is removed keeps its row's name.
    RemoveKeepsRow,
    /// 56: a block that a batch in flight uses is free when its request leaves.
    FreedUnderABatch,
    /// 56: the first batch that is completed ends the uses of all.
    FirstBatchEndsAllUses,
    /// 57: the host block of a copy in flight is not used.
    CopyHoldsNothing,
    /// Blocks in quarantine stay there when their batch is completed.
    QuarantineNeverEnds,
    /// What a batch holds of its second request is looked for in the place of the first.
    HeldOfTheFirst,
    /// A request that is removed stays marked in taken batches.
    RemovedStaysMarked,
    /// Places that a request lost stay in taken batches, for the next owner of its row.
    LostPlacesStay,
    /// 34: a cancelled batch leaves the keys that it gave.
    CancelKeepsKeys,
    /// 37: a cancelled batch leaves the counts of its requests.
    CancelKeepsCounts,
    /// 49: the worker is not told what a cancel makes of tables.
    CancelLeavesTables,
    /// 34: a completed batch publishes what another one has yet to write.
    PublishesInFlight,
    /// A full block is published with the batch behind the one that wrote it.
    PublishedLate,
    /// Blocks behind the last hash are published, if a window has given back more blocks.
    RunsNeedNoHashes,
    /// A request of an older epoch publishes what it computes.
    StalePublishes,
    /// A request of an older epoch comes back to blocks of this one.
    StaleComesBackToHits,
    /// What is free when an epoch ends leaves among others.
    EpochsAge,
    /// What a floor keeps is taken by anyone.
    FloorsNotKept,
    /// What a tenant owns does not count for its floor.
    FloorsForgetOwners,
    /// It is not noted for which tenant a block was taken.
    TakersNotNoted,
}

#[cfg(feature = "mutants")]
mod chosen {
    use std::cell::Cell;

    use super::Mutant;

    thread_local! {
        static CHOSEN: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Seed this bug in this thread, or none.
    pub(crate) fn seed(mutant: Option<Mutant>) {
        CHOSEN.with(|chosen| chosen.set(mutant));
    }

    /// Whether this bug is seeded.
    pub(crate) fn seeded(mutant: Mutant) -> bool {
        CHOSEN.with(Cell::get) == Some(mutant)
    }
}

#[cfg(feature = "mutants")]
pub(crate) use chosen::{seed, seeded};

/// Whether this bug is seeded: never, without the feature.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub(crate) const fn seeded(_: Mutant) -> bool {
    false
}
