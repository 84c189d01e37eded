// SPDX-License-Identifier: Apache-2.0
//! Retention wishes: how long a request wants its content to stay cached.
//!
//! Invariants: levels are 0 to 100, by default 35; blocks of a higher level leave later. A wish has
//! three parts: `base`, without end; `level`, and the ms for which it holds. Wishes are joined by
//! taking the maximum of each part. The wish of a position is the join of the request's wishes from
//! there on, so a token never has less than those after it. Levels and ranges are checked where
//! they are made, in Python.
//! Source: names are those of TensorRT-LLM; there a level is a priority.
//! Twin: kvcore/types/retention.py.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::types::ids::Row;

/// What is wished if nothing is said.
pub const DEFAULT_LEVEL: u8 = 35;
/// The highest level.
pub const LEVEL_MAX: u8 = 100;
/// The longest duration, in ms.
pub const DURATION_MAX: u64 = 1 << 40;
/// The last time, in ms.
pub const TIME_MAX: u64 = 1 << 53;

/// The steps of requests, by row; one that is not there has the defaults.
pub type Wishes = HashMap<Row, Vec<Step>, FxBuildHasher>;
/// Past the last position.
pub const POSITION_MAX: u32 = (1 << 31) - 1;

/// A wish. duration: the ms for which the level holds; 0 and no level without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wish {
    /// For ever.
    pub base: u8,
    /// For a time.
    pub level: u8,
    /// That time.
    pub duration: u64,
}

/// The first position that has a wish, up to the next step.
pub type Step = (u32, Wish);
/// First position, end (None: that of the tokens), wish; of the last one the wish alone counts.
pub type Piece = (u32, Option<u32>, Wish);

/// The wish if nothing is said.
pub const DEFAULT_WISH: Wish = Wish { base: DEFAULT_LEVEL, level: 0, duration: 0 };
/// The wishes of a request that says nothing.
pub const DEFAULT_STEPS: [Step; 1] = [(0, DEFAULT_WISH)];

impl Wish {
    /// Make the wish for one level.
    #[must_use]
    pub fn new(priority: u8, duration: Option<u64>) -> Self {
        match duration {
            None => Wish { base: priority, level: 0, duration: 0 },
            Some(duration) => Wish { base: priority.min(DEFAULT_LEVEL), level: priority, duration },
        }
    }
}

/// Return the wishes of a request at its positions, of which `num_tokens` have tokens.
#[must_use]
pub fn steps_of(pieces: &[Piece], num_tokens: u32) -> Vec<Step> {
    let Some(((_, _, decoded), ranges)) = pieces.split_last() else { return Vec::new() };
    let (mut known, mut at): (Vec<Step>, u32) = (Vec::new(), 0);
    for &(first, end, wish) in ranges {
        let (first, end) = (first.min(num_tokens), end.unwrap_or(num_tokens).min(num_tokens));
        if at < first {
            known.push((at, DEFAULT_WISH));
        }
        if first < end {
            known.push((first, wish));
        }
        at = at.max(end);
    }
    if at < num_tokens {
        known.push((at, DEFAULT_WISH));
    }
    known.push((num_tokens, *decoded));
    let mut behind = Wish::default();
    for (_, wish) in known.iter_mut().rev() {
        behind = join(behind, *wish);
        *wish = behind;
    }
    shortest(known)
}

/// Join two requests' wishes at each position.
#[must_use]
pub fn join_steps(mine: &[Step], theirs: &[Step]) -> Vec<Step> {
    let mut firsts: Vec<u32> = mine.iter().chain(theirs).map(|step| step.0).collect();
    firsts.sort_unstable();
    firsts.dedup();
    let joined = |at| (at, join(wish_at(mine, at), wish_at(theirs, at)));
    shortest(firsts.into_iter().map(joined).collect())
}

/// Return the wish of a position.
#[must_use]
pub fn wish_at(steps: &[Step], position: u32) -> Wish {
    steps[steps.partition_point(|step| step.0 <= position) - 1].1
}

/// The wishes of a request.
pub(crate) fn wishes_of(wishes: &Wishes, row: Row) -> &[Step] {
    wishes.get(&row).map_or(&DEFAULT_STEPS, Vec::as_slice)
}

/// Return the maximum of each part.
#[must_use]
pub fn join(one: Wish, other: Wish) -> Wish {
    Wish {
        base: one.base.max(other.base),
        level: one.level.max(other.level),
        duration: one.duration.max(other.duration),
    }
}

/// Drop steps that change nothing.
fn shortest(mut steps: Vec<Step>) -> Vec<Step> {
    steps.dedup_by_key(|step| step.1);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_has_the_join_of_what_is_wished_from_there_on() {
        let (low, high) = (Wish::new(10, None), Wish::new(80, Some(9)));
        let pieces = [(1, Some(2), low), (4, None, high), (0, None, Wish::new(20, None))];
        let most = Wish { base: 35, level: 80, duration: 9 };
        let steps = steps_of(&pieces, 6);
        assert_eq!(steps, [(0, most), (6, Wish::new(20, None))]);
        assert_eq!((wish_at(&steps, 5), wish_at(&steps, 6)), (most, Wish::new(20, None)));
        let more = steps_of(&[(0, Some(2), Wish::new(90, None)), (0, None, low)], 6);
        let joined = Wish { base: 90, ..most };
        assert_eq!(join_steps(&steps, &more)[..2], [(0, joined), (2, most)]);
    }
}
