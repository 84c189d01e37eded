// SPDX-License-Identifier: Apache-2.0
//! Bytes as the words of a text trace.
//!
//! Every byte string has a meaning, and small changes of it small effects: each word is one or a
//! few bytes, taken modulo what makes sense.

use crate::state::state::State;

/// A call: its verb and its words.
pub(super) type Words = (&'static str, Vec<String>);

/// Bytes that are taken one by one; zeros behind the last one.
pub(super) struct Bytes<'a> {
    left: std::slice::Iter<'a, u8>,
}

impl<'a> Bytes<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Bytes { left: bytes.iter() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.as_slice().is_empty()
    }

    fn next(&mut self) -> u8 {
        self.left.next().copied().unwrap_or(0)
    }

    fn below(&mut self, limit: u8) -> u8 {
        self.next() % limit
    }
}

/// What stands behind a verb.
#[derive(Clone, Copy)]
enum Arg {
    Name,
    Names,
    Tokens,
    Kind,
    Count,
    Options,
    Pairs,
    Blocks,
    Operation,
    Oldest,
    Pin,
    Some,
}

use Arg::{
    Blocks, Count, Kind, Name, Names, Oldest, Operation, Options, Pairs, Pin, Some as Any, Tokens,
};

/// The verbs with their words.
const VERBS: [(&str, &[Arg]); 34] = [
    ("add_request", &[Name, Tokens, Kind]),
    ("allocate_slots", &[Name, Count, Options]),
    ("append", &[Pairs]),
    ("take_batch", &[]),
    ("free", &[Name]),
    ("complete", &[Oldest]),
    ("cancel", &[Any]),
    ("fork", &[Name, Name]),
    ("truncate", &[Name, Count]),
    ("unschedule", &[Name, Count]),
    ("swap_out", &[Names]),
    ("swap_in", &[Names]),
    ("add_tokens", &[Name, Tokens]),
    ("remove_request", &[Name]),
    ("add_drafts", &[Name, Tokens]),
    ("accept", &[Name, Count]),
    ("rewind", &[Count, Names]),
    ("remove_skipped_blocks", &[Name, Count]),
    ("can_allocate", &[Name, Count, Options]),
    ("cache_blocks", &[Name, Count]),
    ("pin", &[Blocks]),
    ("unpin", &[Blocks]),
    ("evict_blocks", &[Blocks]),
    ("store", &[Blocks]),
    ("load", &[Name, Count, Options]),
    ("complete_operation", &[Operation]),
    ("reset_prefix_cache", &[]),
    ("take_events", &[]),
    ("take_stats", &[]),
    ("take_new_block_ids", &[]),
    ("advance_epoch", &[]),
    ("pin_prefix", &[Pin, Name, Count]),
    ("unpin_prefix", &[Pin]),
    ("tick", &[Count]),
];
/// The places of the verbs that carry a run, which are taken more often.
const FREQUENT: [usize; 10] = [0, 1, 1, 1, 2, 2, 3, 3, 5, 5];
const NUM_NAMES: usize = 5;
const NUM_BLOCKS: u8 = 24;
const NUM_OPERATIONS: u8 = 16;
const MOST_COUNT: u8 = 64;
const FLAGS: [&str; 8] = [
    "null_block",
    "enable_caching",
    "duplicates",
    "eviction",
    "enable_events",
    "publish",
    "record_new_blocks",
    "hide_salts",
];

/// The next call on this state; a hit is looked up before the call that uses it.
pub(super) fn next_call(bytes: &mut Bytes, state: &State) -> Vec<Words> {
    let place = usize::from(bytes.next()) % (VERBS.len() + FREQUENT.len());
    let place = place.checked_sub(VERBS.len()).map_or(place, |more| FREQUENT[more]);
    let (verb, args) = VERBS[place];
    let mut words: Vec<String> = Vec::new();
    for arg in args {
        read(*arg, bytes, state, &mut words);
    }
    let looks = args.iter().any(|arg| matches!(arg, Options)) && words.iter().any(|w| w == "hit");
    let look = looks.then(|| ("get_computed_blocks", vec![words[0].clone()]));
    if verb == "load" || verb == "can_allocate" {
        words.retain(|word| verb != "load" || !word.contains('=') && word != "delay");
    }
    look.into_iter().chain([(verb, words)]).collect()
}

fn read(arg: Arg, bytes: &mut Bytes, state: &State, words: &mut Vec<String>) {
    match arg {
        Name => words.push(name(bytes, state)),
        Names => (0..=bytes.below(3)).for_each(|_| words.push(name(bytes, state))),
        Tokens => words.push(tokens(bytes)),
        Kind => {
            let kind = bytes.next();
            for (bit, word) in [(1, "salt=s"), (2, "lora=a"), (4, "skip")] {
                if kind < 8 && kind & bit != 0 {
                    words.push(word.to_owned());
                }
            }
        }
        Count => {
            let count = bytes.next();
            words.push((if count < MOST_COUNT { count } else { count % 8 }).to_string());
        }
        Options => options(bytes, state, words),
        Pairs => {
            for _ in 0..=bytes.below(3) {
                words.push(format!("{}={}", name(bytes, state), token(bytes)));
            }
        }
        Blocks => {
            for _ in 0..=bytes.below(3) {
                words.push(bytes.below(NUM_BLOCKS).to_string());
            }
        }
        Pin => words.push(["p", "q"][usize::from(bytes.next() & 1)].to_owned()),
        Operation => {
            words.push(bytes.below(NUM_OPERATIONS).to_string());
            words.push(if bytes.next() & 1 == 0 { "done" } else { "failed" }.to_owned());
        }
        Oldest | Any => {
            let chosen = bytes.next();
            let numbers: Vec<u64> = state.in_flight().collect();
            let place = if matches!(arg, Oldest) { 0 } else { usize::from(chosen) };
            let known =
                (chosen < 240 && !numbers.is_empty()).then(|| numbers[place % numbers.len()]);
            words.push(known.unwrap_or(u64::from(chosen % 8)).to_string());
        }
    }
}

/// A request of the state, or one of some others.
fn name(bytes: &mut Bytes, state: &State) -> String {
    let known: Vec<String> = state.requests().map(|request| request.name()).collect();
    let choice = usize::from(bytes.next()) % (known.len() + NUM_NAMES);
    known.get(choice).cloned().unwrap_or_else(|| format!("r{}", choice - known.len()))
}

/// A token; half of all bytes are one of two, so that prefixes meet.
fn token(bytes: &mut Bytes) -> u8 {
    let token = bytes.next();
    if token < 128 { token } else { token % 2 }
}

fn tokens(bytes: &mut Bytes) -> String {
    let run = |bytes: &mut Bytes| {
        let (first, more) = (token(bytes), bytes.below(16));
        if more == 0 { first.to_string() } else { format!("{first}-{}", first + more) }
    };
    (0..=bytes.below(4)).map(|_| run(bytes)).collect::<Vec<_>>().join(",")
}

/// Options of an allocation: mostly a hit alone, or none; a hit if the request is known.
fn options(bytes: &mut Bytes, state: &State, words: &mut Vec<String>) {
    let flags = bytes.next();
    let flags = if flags < 128 { flags } else { flags & 1 };
    if flags & 1 != 0 && state.request(&words[0]).is_ok() {
        words.push("hit".to_owned());
    }
    for (bit, word) in [(2, "lookahead"), (4, "external"), (8, "reserved")] {
        if flags & bit != 0 {
            words.push(format!("{word}={}", bytes.below(16)));
        }
    }
    for (bit, word) in [(16, "delay"), (32, "full")] {
        if flags & bit != 0 {
            words.push(word.to_owned());
        }
    }
}

/// The line of a trace that makes the configuration.
pub(super) fn read_config(bytes: &mut Bytes) -> String {
    let mut line = format!("config num_blocks={}", 2 + bytes.below(30));
    let groups: Vec<String> = (0..=bytes.below(3)).map(|_| group(bytes)).collect();
    line += &format!(" groups={}", groups.join(","));
    line += &format!(" num_host_blocks={}", bytes.below(16));
    line += &format!(" max_in_flight={}", bytes.below(4));
    line += &format!(" num_preallocate_tokens={}", bytes.below(8));
    line += &format!(" watermark_blocks={}", bytes.below(4));
    let flags = bytes.next();
    let choices = [
        ["yes", "no"],
        ["yes", "no"],
        ["keep", "merge"],
        ["lru", "uncached_first"],
        ["no", "yes"],
        ["scheduled", "completed"],
        ["no", "yes"],
        ["no", "yes"],
    ];
    match bytes.below(8) {
        0 => {}
        floor @ 1..=3 => {
            line += &format!(" max_model_len={} floors=s:{floor}", 1 + bytes.below(16));
        }
        _ => line += " hash_block_size=1",
    }
    for (at, (name, values)) in FLAGS.iter().zip(choices).enumerate() {
        line += &format!(" {name}={}", values[usize::from(flags >> at & 1)]);
    }
    line
}

fn group(bytes: &mut Bytes) -> String {
    let (size, kind, window) = (1 + bytes.below(8), bytes.next(), 1 + bytes.below(16));
    let zero = if kind & 64 != 0 { "+zero" } else { "" };
    match kind % 8 {
        1 => format!("sliding_window:{size}:{window}{zero}"),
        2 => format!("chunked_local:{size}:{window}{zero}"),
        3 => format!("mla:{size}{zero}"),
        _ => format!("full_attention:{size}{zero}"),
    }
}
