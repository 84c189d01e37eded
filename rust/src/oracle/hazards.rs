// SPDX-License-Identifier: Apache-2.0
//! Checks that a batch is free of hazards, by what its commands read and write.
//!
//! No transition calls anything here. A checker gets the state in which the batch was empty, its
//! commands in order and the segment of each. The sets are the first opinion (CMD-HAZARD,
//! CMD-COPYSET), executing in other orders is the second (CMD-ORDER): each place begins with a
//! content of its own, so that two orders agree only if every copy copies the same. A batch with
//! one copy has one order. Twin: kvcore/oracle/hazards.py.

use smallvec::SmallVec;

use crate::oracle::contents::TierBlock;
use crate::state::state::State;
use crate::types::commands::{Command, Commands, Tier, segments};
use crate::types::ids::BlockId;
use crate::types::keys::Key;
use crate::types::violation::{Checks, Finding, Violation};

/// What a place holds: what stood in a place at first, or what a command made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Held {
    Of(TierBlock),
    Zeros,
    Loaded(u32),
}
/// The places that hold something else than at first, in order.
type Contents = SmallVec<[(TierBlock, Held); 8]>;
/// A command that reads or writes a place, and its segment.
type Copied = (i32, Command);

/// Up to this many copies of a segment are tried in every order; with more, each pair is swapped.
const MAX_ORDERS: usize = 4;

/// The properties of this file, by name.
pub const BATCH_PROPERTIES: [&str; 5] =
    ["CMD-HAZARD", "CMD-COPYSET", "CMD-EVICT-FIRST", "CMD-COW-SRC", "CMD-ORDER"];

/// Fails with the first property that counts and that the open batch of a state breaks; start: the
/// state in which it was empty.
pub fn check(start: &State, opened: &State, checks: &Checks) -> Result<(), Violation> {
    check_commands(start, &opened.effects.commands, None, checks)
}

/// The same for any commands, in these segments if they are given.
pub fn check_commands(
    start: &State,
    commands: &Commands,
    given: Option<&[i32]>,
    checks: &Checks,
) -> Result<(), Violation> {
    let is_copy = |command: &Command| command.reads().is_some() || command.writes().is_some();
    let mut copies: Vec<Copied> = Vec::new();
    let num_copies = commands.iter().filter(is_copy).count();
    if given.is_some() || num_copies > 1 {
        let numbers = given.map_or_else(|| segments(commands), <[i32]>::to_vec);
        if numbers.len() != commands.len() || !numbers.is_sorted() {
            let detail = format!("{} commands have segments {numbers:?}", commands.len());
            return checks.hear_finding("CMD-HAZARD", Err(detail));
        }
        let numbered = numbers.into_iter().zip(commands.iter());
        copies.extend(numbered.filter(|(_, command)| is_copy(command)));
    }
    let by_segment = || copies.chunk_by(|one, other| one.0 == other.0);
    checks.hear_finding("CMD-HAZARD", by_segment().try_for_each(hazards))?;
    checks.hear_finding("CMD-COPYSET", by_segment().try_for_each(copy_set))?;
    checks.hear_finding("CMD-EVICT-FIRST", evict_first(start, commands))?;
    if num_copies > 0 {
        checks.hear_finding("CMD-COW-SRC", copy_source(commands))?;
    }
    checks.hear_finding("CMD-ORDER", orders(by_segment()))
}

/// CMD-HAZARD: no block is written twice, or both read and written, in one segment.
fn hazards(segment: &[Copied]) -> Finding {
    for (at, (number, one)) in segment.iter().enumerate() {
        let Some(target) = one.writes() else { continue };
        if segment[..at].iter().any(|(_, other)| other.writes() == Some(target)) {
            return Err(format!("segment {number} writes {target:?} twice"));
        }
        if segment.iter().any(|(_, other)| other.reads() == Some(target)) {
            return Err(format!("segment {number} reads and writes {target:?}"));
        }
    }
    Ok(())
}

/// CMD-COPYSET: in a segment each target has one source, and is not itself a source.
fn copy_set(segment: &[Copied]) -> Finding {
    let pairs = segment.iter().filter_map(|(_, each)| Some((each.reads()?, each.writes()?)));
    let pairs: SmallVec<[(TierBlock, TierBlock); 8]> = pairs.collect();
    for &(source, target) in &pairs {
        if pairs.iter().any(|&(other, to)| to == target && other != source) {
            return Err(format!("two blocks are copied to {target:?}"));
        }
        if pairs.iter().any(|&(other, _)| other == target) {
            return Err(format!("{target:?} is copied from and to"));
        }
    }
    Ok(())
}

/// CMD-EVICT-FIRST: a key is withdrawn before its block is allocated or overwritten.
fn evict_first(start: &State, commands: &Commands) -> Finding {
    let mut gone: SmallVec<[(BlockId, Key); 8]> = SmallVec::new();
    for command in commands.iter() {
        let has_key = |block: BlockId| {
            let mut keys = start.device.key(block).into_iter().chain(start.device.tail_keys(block));
            keys.any(|&key| !gone.contains(&(block, key)))
        };
        match command {
            Command::Evict { block, key } => gone.push((block, key)),
            Command::EvictAll => return Ok(()),
            Command::Allocate { block } if has_key(block) => {
                return Err(format!("block {} is allocated before its key is withdrawn", block.0));
            }
            Command::Allocate { .. } => {}
            _ => match command.writes() {
                Some((Tier::Device, block)) if has_key(block) => {
                    return Err(format!("{command:?} writes a block that has a key"));
                }
                _ => {}
            },
        }
    }
    Ok(())
}

/// CMD-COW-SRC: the source of a copy still has its content when the copy runs.
fn copy_source(commands: &Commands) -> Finding {
    let mut empty: SmallVec<[BlockId; 8]> = SmallVec::new();
    for command in commands.iter() {
        if let Some((Tier::Device, source)) = command.reads()
            && empty.contains(&source)
        {
            return Err(format!("{command:?} reads a block allocated again before it"));
        }
        if let Command::Allocate { block } = command {
            empty.push(block);
        } else if let Some((Tier::Device, target)) = command.writes() {
            empty.retain(|block| *block != target);
        }
    }
    Ok(())
}

/// CMD-ORDER: the contents are the same in program order, in any order inside segments, and if all
/// reads of a segment come before all its writes.
fn orders<'a>(segments: impl Iterator<Item = &'a [Copied]>) -> Finding {
    let mut contents = Contents::new();
    for segment in segments {
        let copies: Vec<Command> = segment.iter().map(|(_, command)| *command).collect();
        let wanted = run(&contents, &copies, false);
        let (number, count) = (segment[0].0, copies.len());
        if count > 1 {
            if all_orders(&copies).iter().any(|order| run(&contents, order, false) != wanted) {
                return Err(format!("segment {number} depends on the order of its {count} copies"));
            }
            if run(&contents, &copies, true) != wanted {
                return Err(format!(
                    "segment {number} depends on which reads come before its writes"
                ));
            }
        }
        contents = wanted;
    }
    Ok(())
}

/// The orders to try: all of few copies, of more the one backward and each swap of two.
fn all_orders(copies: &[Command]) -> Vec<Vec<Command>> {
    if copies.len() > MAX_ORDERS {
        let mut found: Vec<Vec<Command>> = vec![copies.iter().rev().copied().collect()];
        for second in 0..copies.len() {
            for first in 0..second {
                let mut order = copies.to_vec();
                order.swap(first, second);
                found.push(order);
            }
        }
        return found;
    }
    let mut found: Vec<Vec<Command>> = vec![Vec::new()];
    for command in copies {
        let longer = |order: &Vec<Command>| {
            let order = order.clone();
            (0..=order.len()).map(move |place| {
                let mut longer = order.clone();
                longer.insert(place, *command);
                longer
            })
        };
        found = found.iter().flat_map(longer).collect();
    }
    found
}

/// Contents after copies, one after the other, or all reading what was there before.
fn run(contents: &Contents, copies: &[Command], at_once: bool) -> Contents {
    let mut after = contents.clone();
    for command in copies {
        let Some(target) = command.writes() else { continue };
        let sources = if at_once { contents } else { &after };
        let written = match (command.reads(), command) {
            (Some(source), _) => holds(sources, source),
            (None, Command::Load { operation, .. }) => Held::Loaded(*operation),
            (None, _) => Held::Zeros,
        };
        match after.binary_search_by_key(&target, |each| each.0) {
            Ok(place) => after[place].1 = written,
            Err(place) => after.insert(place, (target, written)),
        }
    }
    after
}

/// What a place holds; itself at first.
fn holds(contents: &Contents, place: TierBlock) -> Held {
    let known = contents.binary_search_by_key(&place, |each| each.0);
    known.map_or(Held::Of(place), |known| contents[known].1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::state::make_state;
    use crate::types::config::Config;
    use crate::types::keys::Key;

    const A: BlockId = BlockId(1);
    const B: BlockId = BlockId(2);
    const C: BlockId = BlockId(3);

    fn copy(source: BlockId, target: BlockId) -> Command {
        Command::CopyOnWrite { source, target }
    }

    /// What is found in commands that stand in these segments; block A has a key at first.
    fn found(commands: &[Command], numbers: Option<&[i32]>, only: &str) -> Option<&'static str> {
        let mut state = make_state(Config::new(5, 2, b"seed")).unwrap();
        state.device.publish(A, Key([1; 36]));
        let checks = Checks::only([only.to_owned()]);
        let commands = commands.iter().copied().collect();
        check_commands(&state, &commands, numbers, &checks).err().map(|found| found.property)
    }

    #[test]
    fn each_check_finds_its_own_wrong_batch() {
        let cases: [(&str, &[Command], &[i32]); 6] = [
            ("CMD-HAZARD", &[copy(A, B), copy(B, C)], &[0, 0]),
            ("CMD-HAZARD", &[copy(A, B), copy(C, B)], &[1, 0]),
            ("CMD-COPYSET", &[copy(A, B), copy(C, B)], &[0, 0]),
            ("CMD-ORDER", &[copy(A, B), copy(B, C)], &[0, 0]),
            ("CMD-EVICT-FIRST", &[Command::Allocate { block: A }], &[0]),
            ("CMD-COW-SRC", &[Command::Allocate { block: B }, copy(B, C)], &[0, 0]),
        ];
        for (name, commands, numbers) in cases {
            assert_eq!(found(commands, Some(numbers), name), Some(name), "{commands:?}");
        }
    }

    #[test]
    fn the_segments_of_the_core_have_no_hazard() {
        let evict = Command::Evict { block: A, key: Key([1; 36]) };
        let commands = [
            copy(A, B),
            copy(A, C),
            copy(B, A),
            evict,
            Command::Allocate { block: A },
            Command::Zero { block: A },
            Command::SwapOut { block: B, host_block: A },
        ];
        let broken = |name: &str| found(&commands[..2], None, name);
        assert!(BATCH_PROPERTIES.iter().all(|name| broken(name).is_none()));
        let broken = |name: &str| found(&commands[3..], None, name);
        assert!(BATCH_PROPERTIES.iter().all(|name| broken(name).is_none()));
    }
}
