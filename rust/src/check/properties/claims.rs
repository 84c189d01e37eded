// SPDX-License-Identifier: Apache-2.0
//! Properties of what one call does to pins, and of the content that a pinned prefix keeps.
//!
//! A part of transitions.rs. Twin: kvcore/check/properties/claims.py.

use std::borrow::Cow;

use crate::check::properties::published::Made;
use crate::oracle::calls::{Call, Name, Value};
use crate::state::state::State;
use crate::state::state::named_pins::named_blocks;
use crate::transitions::free::free;
use crate::transitions::prefix_lookup::is_found;
use crate::transitions::publish::evict_blocks;
use crate::types::ids::BlockId;
use crate::types::violation::Finding;

/// PINS: a block's pins are those of its operations, of `pin` and `unpin`, and of pinned prefixes,
/// which only `pin_prefix` and `unpin_prefix` change.
pub(crate) fn pins(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    let mut named = Cow::Borrowed(&after.named_pins);
    match made.call {
        Call::PinPrefix { pin, .. } => _ = named.to_mut().remove(*pin),
        Call::UnpinPrefix { pin } => named.to_mut().extend(
            before.named_pins.get_key_value(*pin).map(|(name, held)| (name.clone(), held.clone())),
        ),
        _ => {}
    }
    if *named != before.named_pins {
        return Err(format!("{} leaves the pins {:?}", made.call.transition(), after.named_pins));
    }
    let same = before.device.pins == after.device.pins && before.named_pins == after.named_pins;
    if same && before.operations.keys().eq(after.operations.keys()) {
        return Ok(());
    }
    for block in (0..before.config.num_blocks).map(BlockId) {
        let change = match made.call {
            Call::Pin { block: named } => i64::from(*named == block.0),
            Call::Unpin { block: named } => -i64::from(*named == block.0),
            _ => 0,
        };
        let (expected, left) = (pins_alone(before, block) + change, pins_alone(after, block));
        if left != expected {
            let (name, block) = (made.call.transition(), block.0);
            return Err(format!("{name} leaves {left} pins of block {block}, not {expected}"));
        }
    }
    Ok(())
}

/// Return the pins of a block by its id.
pub(crate) fn pins_alone(state: &State, block: BlockId) -> i64 {
    let operations = state.operations.values().map(|operation| operation.block);
    let held = operations.chain(named_blocks(&state.named_pins)).filter(|&each| each == block);
    i64::from(state.device.num_pins(block)) - held.count() as i64
}

/// PIN-HIT: if the prefix that a new pin covers was findable, it stays so when everything else that
/// is cached is evicted; and until `evict_blocks`, a report or new weights, its blocks keep a key.
pub(crate) fn pin_hit(made: &Made<'_>) -> Finding {
    let (Call::PinPrefix { pin, name, .. }, Value::Covered(length)) =
        (made.call, &made.outcome.value)
    else {
        return match made.call {
            Call::EvictBlocks { .. } | Call::Rewind { .. } | Call::AdvanceEpoch => Ok(()),
            call => keys_stay(made, call),
        };
    };
    let Some(row) =
        name.row(made.before).filter(|&row| is_found(made.before, &made.before[row], *length))
    else {
        return Ok(());
    };
    let mut after = made.after.clone();
    let names: Vec<Name> = after.requests().map(Name::of).collect();
    names.into_iter().for_each(|name| _ = free(&mut after, name.id()));
    let idle = |&block: &BlockId| after.device.has_key(block) && after.device.num_pins(block) == 0;
    let idle = (0..after.config.num_blocks).map(BlockId).filter(idle);
    let idle: Vec<i64> = idle.map(|block| i64::from(block.0)).collect();
    _ = evict_blocks(&mut after, &idle);
    if is_found(&after, &made.before[row], *length) {
        return Ok(());
    }
    Err(format!("not all of the {length} tokens that pin {pin} covers are kept"))
}

fn keys_stay(made: &Made<'_>, call: &Call) -> Finding {
    for (pin, held) in &made.before.named_pins {
        let (had, has) = (&made.before.device, &made.after.device);
        let is_lost = |block: &&BlockId| had.has_key(**block) && !has.has_key(**block);
        if let Some(BlockId(block)) = held.blocks.iter().find(is_lost) {
            let name = call.transition();
            return Err(format!("{name} takes the keys of block {block}, which pin {pin:?} holds"));
        }
    }
    Ok(())
}
