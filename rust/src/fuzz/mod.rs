// SPDX-License-Identifier: Apache-2.0
//! Fuzzing: any bytes are a run of calls on the twin, which must keep every invariant.
//!
//! Bytes become the words of a text trace (`words.rs`), so that a run that fails is printed as one
//! and replayed by both backends. Inputs continue the project's traces from any point, or begin
//! anew. A few seconds of random inputs are part of `cargo test`; `BOLERO_RANDOM_TEST_TIME_MS`
//! makes it longer, and `cargo bolero` can lead it by coverage.

mod allocations;
mod damage;
mod doors;
mod memory;
mod words;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use crate::fuzz::words::{Bytes, next_call, read_config};
use crate::invariants::pool_and_state;
use crate::invariants::requests::Scratch;
use crate::trace::runner::Runner;
use crate::trace::trace_file::{parse_trace, project_traces};
use crate::types::violation::Checks;

const MAX_CALLS: usize = 80;
const MAX_BYTES: usize = 400;
const SECONDS: u64 = 3;

/// A run that broke something: its trace, and what.
#[derive(Debug)]
struct Broken {
    trace: String,
    what: String,
}

/// A run of calls, each followed by a check of the state.
struct Run {
    runner: Runner,
    scratch: Scratch,
    trace: String,
}

impl Run {
    fn call(&mut self, verb: &str, words: &[String]) -> Result<(), Broken> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.trace += &format!("\n{verb} {}", words.join(" "));
        let called = catch_unwind(AssertUnwindSafe(|| self.runner.call(verb, &words)));
        let what = match called {
            Ok(Ok(lines)) => {
                self.trace.extend(lines.iter().map(|line| format!("\n  {line}")));
                let state = &self.runner.state;
                match pool_and_state::check(state, &Checks::default(), &mut self.scratch) {
                    Ok(()) => return Ok(()),
                    Err(found) => found.to_string(),
                }
            }
            Ok(Err(bad)) => bad.0,
            Err(panic) => said(panic.as_ref()),
        };
        Err(Broken { trace: self.trace.clone(), what })
    }
}

/// Make the calls of a trace, then those that some bytes mean; how many were made.
fn run(text: &str, mut bytes: Bytes<'_>) -> Result<usize, Broken> {
    let Ok(trace) = parse_trace(text, "fuzz") else { return Ok(0) };
    let Ok(runner) = Runner::new(trace.config.clone()) else { return Ok(0) };
    let config = text.lines().find(|line| line.starts_with("config")).unwrap_or_default();
    let mut run = Run { runner, scratch: Scratch::default(), trace: config.to_owned() };
    for call in &trace.calls {
        run.call(&call.verb, &call.words)?;
    }
    let mut count = 0;
    while count < MAX_CALLS && !bytes.is_empty() {
        for (verb, words) in next_call(&mut bytes, &run.runner.state) {
            run.call(verb, &words)?;
        }
        count += 1;
    }
    Ok(trace.calls.len() + count)
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}

/// How the run of an input begins: as a trace up to some point, if its first byte says so, else
/// with the configuration that its bytes mean; and the bytes that are left.
fn start<'a>(input: &'a [u8], traces: &[String]) -> (String, Bytes<'a>) {
    if let [which @ 64..=255, part, rest @ ..] = input {
        let lines: Vec<&str> = traces[usize::from(*which) % traces.len()].lines().collect();
        let end = 1 + (lines.len() - 1) * usize::from(*part) / 255;
        return (lines[..end].join("\n"), Bytes::new(rest));
    }
    let mut bytes = Bytes::new(input);
    (read_config(&mut bytes), bytes)
}

/// The calls of the project's traces, without what they come to.
fn traces() -> Vec<String> {
    let of = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).expect("a trace of the project");
        let is_call = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase());
        text.lines().filter(is_call).collect::<Vec<_>>().join("\n")
    };
    project_traces().iter().map(of).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let value = |digit: u8| (digit as char).to_digit(16).expect("a hexadecimal digit") as u8;
    digits.chunks_exact(2).map(|pair| value(pair[0]) * 16 + value(pair[1])).collect()
}

#[test]
fn every_call_of_the_traces_keeps_the_invariants() {
    let mut count = 0;
    for trace in traces() {
        match run(&trace, Bytes::new(&[])) {
            Ok(calls) => count += calls,
            Err(Broken { trace, what }) => panic!("{trace}\n# {what}"),
        }
    }
    assert!(count > 500, "the traces make {count} calls");
}

#[test]
fn any_bytes_keep_the_invariants() {
    let traces = traces();
    let seconds = std::time::Duration::from_secs(SECONDS);
    let mut check = bolero::check!().with_max_len(MAX_BYTES);
    if std::env::var_os("BOLERO_RANDOM_TEST_TIME_MS").is_none() {
        check = check.with_test_time(seconds);
    }
    check.for_each(|input: &[u8]| {
        let (text, bytes) = start(input, &traces);
        if let Err(Broken { trace, what }) = run(&text, bytes) {
            panic!("{trace}\n# {what}");
        }
    });
}
