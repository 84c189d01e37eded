// SPDX-License-Identifier: Apache-2.0
//! Bytes from outside, damaged: a typed error, or a value that has the same bytes again.
//!
//! No panic, and no more memory than the bytes can need, whatever number they hold. Some inputs a
//! decoder are part of `cargo test`; `BOLERO_RANDOM_ITERATIONS` makes more. tests/bytes/doors.py
//! does the same for the Python decoders.

use twox_hash::XxHash3_128;

use super::damage::{Sample, damaged, split_at, split_words};
use super::from_hex;
use super::memory::take_largest;
use crate::codec::decode::decode;
use crate::codec::encode::encode;
use crate::invariants::pool_and_state;
use crate::invariants::requests::Scratch;
use crate::trace::runner::Runner;
use crate::trace::trace_file::{outcomes, parse_trace, project_traces, read_trace};
use crate::types::commands::{Batch, close};
use crate::types::errors::Error;
use crate::types::event_log::read_event;
use crate::types::violation::Checks;
use crate::types::wire::Reader;

const INPUTS: usize = 2000;
/// The same of states, which a manager takes from outside.
const STATES: usize = 10_000;
const MAX_BYTES: usize = 48;
/// Bytes at once for a byte of input: a block is at most so much larger than what says it.
const GROWTH: usize = 64;
/// Bytes at once for what does not depend on the input.
const ROOM: usize = 1 << 16;
/// The same for a trace, which may ask for 65,536 blocks and tokens.
const TRACE_ROOM: usize = 1 << 24;
const TRACE_WORDS: [&str; 21] = [
    "0-4294967295",
    "4294967295",
    "4294967296",
    "-1",
    "+1",
    "1_0",
    "\u{85}",
    "\u{2028}",
    "\x1c",
    "\u{e9}",
    "num_blocks=2147483647",
    "hit",
    "full",
    "external=2",
    "own=ab",
    "embeds=ab",
    "take_batch",
    "rewind",
    "cancel",
    "\n",
    "\r",
];

/// Ask a decoder about many inputs.
fn fuzz(samples: &[Sample], words: &[&str], room: usize, read: impl Fn(&[u8])) {
    fuzz_often(INPUTS, samples, words, room, read);
}

/// Ask a decoder about this many inputs.
fn fuzz_often(
    inputs: usize,
    samples: &[Sample],
    words: &[&str],
    room: usize,
    read: impl Fn(&[u8]),
) {
    let read = std::panic::AssertUnwindSafe(read);
    let mut check = bolero::check!().with_max_len(MAX_BYTES);
    if std::env::var_os("BOLERO_RANDOM_ITERATIONS").is_none() {
        check = check.with_iterations(inputs);
    }
    check.for_each(|input: &[u8]| {
        let data = damaged(input, samples, words);
        take_largest();
        read(&data);
        let most = room + GROWTH * data.len();
        let largest = take_largest();
        assert!(largest <= most, "{largest} bytes at once for {} of input", data.len());
    });
}

/// The bytes of a state in the middle of each trace, and of the one at its end.
fn states() -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for path in project_traces() {
        let trace = read_trace(&path).expect("a trace of the project");
        let mut runner = Runner::new(trace.config.clone()).expect("a config");
        for (at, call) in trace.calls.iter().enumerate() {
            let words: Vec<&str> = call.words.iter().map(String::as_str).collect();
            runner.call(&call.verb, &words).expect("a call that can be read");
            if at == trace.calls.len() / 2 || at + 1 == trace.calls.len() {
                found.push(encode(&runner.state));
            }
        }
    }
    found.retain(|data| data.len() < 1500);
    found
}

/// The fields of bytes: where a decoder stops if they are cut, from the last one to the first.
fn split(data: &[u8], read: impl Fn(&[u8]) -> Result<(), Error>) -> Sample {
    let (mut stops, mut end) = (Vec::new(), data.len());
    while end > 0 {
        end -= 1;
        if let Err(Error::DamagedState { offset, .. }) = read(&data[..end]) {
            end = offset as usize; // cut anywhere behind this place, the field stops there too
            stops.push(end);
        }
    }
    split_at(data, stops)
}

/// Whether an error is one of those that bytes may have, with its place.
fn is_typed(error: &Error, size: usize) -> bool {
    match error {
        Error::DamagedState { offset, .. } => (0..=size as i64).contains(offset),
        _ => false,
    }
}

#[test]
fn damaged_states_are_refused_or_have_the_same_bytes_again() {
    let samples: Vec<Sample> =
        states().iter().map(|data| split(data, |data| decode(data).map(drop))).collect();
    fuzz_often(STATES, &samples, &[], ROOM, |data| match decode(data) {
        Err(error) => assert!(is_typed(&error, data.len()), "{error}"),
        Ok(state) => {
            assert_eq!(encode(&state), data);
            // A state that is well formed and untrue is named, and nothing panics.
            _ = pool_and_state::check(&state, &Checks::default(), &mut Scratch::default());
        }
    });
}

fn read_events(data: &[u8]) -> Result<(), Error> {
    let mut source = Reader::new(data);
    while source.offset() < data.len() {
        read_event(&mut source)?;
    }
    Ok(())
}

#[test]
fn damaged_events_are_refused_or_read() {
    let logs = states().into_iter().filter_map(|data| {
        let log = decode(&data).expect("a state").effects.events;
        (!log.is_empty()).then(|| log.as_bytes().to_vec())
    });
    let samples: Vec<Sample> = logs.map(|data| split(&data, read_events)).collect();
    assert!(!samples.is_empty());
    fuzz(&samples, &[], ROOM, |data| {
        if let Err(error) = read_events(data) {
            assert!(is_typed(&error, data.len()), "{error}");
        }
    });
}

#[test]
fn damaged_batches_are_refused_or_have_the_same_commands_again() {
    let mut samples = Vec::new();
    for data in states() {
        let commands = decode(&data).expect("a state").effects.commands;
        let Batch { buffer, keys, .. } = close(0, &commands);
        if !buffer.is_empty() {
            let size = (buffer.len() as u32).to_le_bytes();
            let columns = buffer.iter().map(|value| value.to_vec());
            samples.push([vec![size.to_vec()], columns.collect(), vec![keys]].concat());
        }
    }
    fuzz(&samples, &[], ROOM, |data| {
        let (size, rest) = data.split_at(data.len().min(4));
        let count = size.try_into().map_or(0, u32::from_le_bytes) as usize;
        let columns = rest.as_chunks().0;
        let (buffer, _) = columns.split_at(columns.len().min(count));
        let keys = rest[4 * buffer.len()..].to_vec();
        let batch = Batch { number: 7, buffer: buffer.to_vec(), keys, epoch: 0 };
        match batch.commands() {
            Ok(commands) => {
                let again = close(7, &commands.iter().copied().collect());
                assert_eq!(again.commands(), Ok(commands));
            }
            Err(error) => assert!(matches!(error, Error::DamagedBatch { batch: 7, .. }), "{error}"),
        }
    });
}

#[test]
fn damaged_traces_are_refused_or_replayed() {
    let texts = project_traces().into_iter();
    let texts = texts.map(|path| std::fs::read_to_string(path).expect("a trace of the project"));
    let samples: Vec<Sample> = texts.map(|text| split_words(&text)).collect();
    fuzz(&samples, &TRACE_WORDS, TRACE_ROOM, |data| {
        let text = String::from_utf8_lossy(data);
        match parse_trace(&text, "fuzz").and_then(|trace| outcomes(&trace)) {
            Ok(_) | Err(Error::TraceError { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    });
}

/// The result of a text read as a trace: the refused line, or a digest of all outcomes.
fn digest_of(text: &str) -> String {
    match parse_trace(text, "fuzz").and_then(|trace| outcomes(&trace)) {
        Ok(lines) => {
            let lines: Vec<String> = lines.iter().map(|lines| lines.join("\n")).collect();
            format!("{:032x}", XxHash3_128::oneshot(lines.join("\n\n").as_bytes()))
        }
        Err(Error::TraceError { line, .. }) => format!("line {line}"),
        Err(error) => panic!("{error}"),
    }
}

/// `python -m tests.bytes.agree` writes the file and names it in `KVCORE_TRACES`.
#[test]
fn both_languages_run_a_trace_alike() {
    let Some(path) = std::env::var_os("KVCORE_TRACES") else { return };
    let cases = std::fs::read_to_string(path).expect("the file that was named");
    for (number, line) in cases.lines().enumerate() {
        let (text, expected) = line.split_once(' ').expect("a text and what it comes to");
        let text = String::from_utf8(from_hex(text)).expect("a text");
        assert_eq!(digest_of(&text), expected, "case {number}:\n{text}");
    }
}
