// SPDX-License-Identifier: Apache-2.0
//! Unit tests of the commands.

use super::*;
use crate::types::commands::segments::{NONE, uses};

const A: BlockId = BlockId(1);
const B: BlockId = BlockId(2);
const C: BlockId = BlockId(3);

fn every_command() -> Vec<Command> {
    vec![
        Command::Allocate { block: A },
        Command::Touch { block: B },
        Command::Evict { block: A, key: Key([7; KEY_SIZE]) },
        Command::EvictAll,
        Command::Free { block: C, cached: true },
        Command::Evict { block: B, key: Key([8; KEY_SIZE]) },
        Command::Zero { block: A },
        Command::CopyOnWrite { source: B, target: C },
        Command::SwapOut { block: A, host_block: B },
        Command::SwapIn { host_block: A, block: B },
        Command::Store { operation: 7, block: A, key: Key([9; KEY_SIZE]) },
        Command::Load { operation: 8, key: Key([10; KEY_SIZE]), block: C },
        Command::SetTable { row: Row(4), group_id: 1, position: 2, block: C },
        Command::CutTable { row: Row(4), group_id: 1, length: 2 },
    ]
}

#[test]
fn a_batch_reads_as_the_commands_that_were_pushed() {
    let commands: Commands = every_command().into_iter().collect();
    assert_eq!(commands.iter().collect::<Vec<_>>(), every_command());
    let batch = close(5, &commands);
    assert_eq!(batch.commands(), Ok(every_command()));
    assert_eq!((batch.number, batch.len()), (5, 14));
    assert_eq!(close(0, &Commands::default()).commands(), Ok(vec![]));
}

#[test]
fn a_row_names_the_blocks_that_its_command_reads_and_writes() {
    let number = |(tier, block): (Tier, BlockId)| u64::from(block.0) << 1 | tier as u64;
    for command in every_command() {
        let made: Commands = [command].into_iter().collect();
        let used = [command.reads(), command.writes()];
        assert_eq!(uses(&made.rows[0]), used.map(|used| used.map_or(NONE, number)));
        assert_eq!(made.moving.is_empty(), used == [None, None], "{command:?}");
    }
}

#[test]
fn columns_are_little_endian_and_one_after_the_other() {
    let commands = [Command::Allocate { block: A }, Command::Free { block: C, cached: true }];
    let batch = close(0, &commands.into_iter().collect());
    let values: Vec<i32> = (0..6).flat_map(|column| batch.column(column)).collect();
    assert_eq!(values, [1, 5, 0, 0, 1, 3, 0, 1, 0, 0, 0, 0]);
    assert_eq!(batch.buffer[..2], [[1, 0, 0, 0], [5, 0, 0, 0]]);
}

#[test]
fn a_segment_opens_at_each_hazard_and_tiers_do_not_meet() {
    let numbers = |commands: &[Command]| segments(&commands.iter().copied().collect());
    let copy = |source, target| Command::CopyOnWrite { source, target };
    assert_eq!(numbers(&[copy(A, B), copy(A, C)]), [0, 0]);
    assert_eq!(numbers(&[copy(A, B), copy(B, C)]), [0, 1], "read after write");
    assert_eq!(numbers(&[copy(A, B), copy(C, A)]), [0, 1], "write after read");
    assert_eq!(numbers(&[copy(A, B), copy(C, B)]), [0, 1], "write after write");
    let host = Command::SwapOut { block: A, host_block: B };
    assert_eq!(numbers(&[copy(A, B), host, copy(B, C)]), [0, 0, 1]);
    assert_eq!(numbers(&[host, Command::SwapIn { host_block: B, block: A }]), [0, 1]);
}
