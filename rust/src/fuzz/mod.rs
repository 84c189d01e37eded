// SPDX-License-Identifier: Apache-2.0
//! Fuzzing: any bytes are a run of calls on the twin, which must keep every invariant.
//!
//! Bytes become the words of a text trace (`words.rs`), so that a run that fails is printed as one
//! and replayed by both backends. `tests/fuzz` holds a run for each of the project's traces, as
//! hexadecimal text; inputs continue those runs from any point, or begin anew. A few seconds of
//! random inputs are part of `cargo test`; `BOLERO_RANDOM_TEST_TIME_MS` makes it longer, and `cargo
//! bolero` can lead it by coverage.

mod damage;
mod doors;
mod memory;
mod words;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use crate::fuzz::words::{Bytes, next_call, read_config, write_trace};
use crate::invariants::pool_and_state;
use crate::invariants::requests::Scratch;
use crate::trace::runner::Runner;
use crate::trace::trace_file::{parse_trace, read_trace};
use crate::types::violation::Judges;

const MAX_CALLS: usize = 80;
const MAX_BYTES: usize = 400;
const SECONDS: u64 = 3;

/// A run that broke something: its trace, and what.
#[derive(Debug)]
struct Broken {
    trace: String,
    what: String,
}

/// Make the run of some bytes, and judge the state after every call; how many calls were made.
fn run(bytes: &[u8]) -> Result<usize, Broken> {
    let mut bytes = Bytes::new(bytes);
    let mut text = read_config(&mut bytes);
    let Ok(config) = parse_trace(&text, "fuzz").map(|trace| trace.config) else { return Ok(0) };
    let Ok(mut runner) = Runner::new(config) else { return Ok(0) };
    let (mut scratch, mut count) = (Scratch::default(), 0);
    while count < MAX_CALLS && !bytes.is_empty() {
        for (verb, words) in next_call(&mut bytes, &runner.state) {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            text += &format!("\n{verb} {}", words.join(" "));
            let called = catch_unwind(AssertUnwindSafe(|| runner.call(verb, &words)));
            let what = match called {
                Ok(Ok(lines)) => {
                    text.extend(lines.iter().map(|line| format!("\n  {line}")));
                    match pool_and_state::check(&runner.state, &Judges::default(), &mut scratch) {
                        Ok(()) => continue,
                        Err(found) => found.to_string(),
                    }
                }
                Ok(Err(bad)) => bad.0,
                Err(panic) => said(panic.as_ref()),
            };
            return Err(Broken { trace: text, what });
        }
        count += 1;
    }
    Ok(count)
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}

/// The bytes of an input: a run of the corpus up to some point, if its first byte asks for one,
/// then its own.
fn continued(input: &[u8], corpus: &[Vec<u8>]) -> Vec<u8> {
    let [which, part, rest @ ..] = input else { return input.to_vec() };
    if *which < 64 {
        return input.to_vec();
    }
    let base = &corpus[usize::from(*which) % corpus.len()];
    let end = base.len() * (1 + usize::from(*part)) / 256;
    [&base[..end], rest].concat()
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// The files of a folder with an extension, by name.
fn files(name: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder(name)).expect("the folder is in the repository");
    let paths = entries.map(|entry| entry.expect("a folder can be listed").path());
    let mut found: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|ext| ext == extension)).collect();
    found.sort();
    found
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let value = |digit: u8| (digit as char).to_digit(16).expect("a hexadecimal digit") as u8;
    digits.chunks_exact(2).map(|pair| value(pair[0]) * 16 + value(pair[1])).collect()
}

fn to_hex(bytes: &[u8]) -> String {
    let lines = bytes.chunks(32).map(|line| line.iter().map(|b| format!("{b:02x}")).collect());
    lines.map(|line: String| line + "\n").collect()
}

fn corpus() -> Vec<Vec<u8>> {
    let read = |path: &PathBuf| std::fs::read_to_string(path).expect("a file of the corpus");
    files("fuzz", "hex").iter().map(|path| from_hex(&read(path))).collect()
}

#[test]
fn every_run_of_the_corpus_holds() {
    if std::env::var_os("KVCORE_WRITE_CORPUS").is_some() {
        for path in files("traces", "trace") {
            let trace = read_trace(&path).expect("a trace of the project");
            let name = path.file_stem().expect("a trace has a name").to_string_lossy();
            let file = folder("fuzz").join(format!("{name}.hex"));
            std::fs::write(file, to_hex(&write_trace(&trace))).expect("the corpus can be written");
        }
    }
    let mut count = 0;
    for bytes in corpus() {
        match run(&bytes) {
            Ok(calls) => count += calls,
            Err(Broken { trace, what }) => panic!("{trace}\n# {what}"),
        }
    }
    assert!(count > 200, "the corpus makes {count} calls");
}

#[test]
fn a_trace_becomes_bytes_and_these_its_calls() {
    let text = "config num_blocks=6 block_size=2 max_in_flight=1\nadd_request r0 0-3,7 salt=s\n\
                allocate_slots r0 5\ntake_batch\ncomplete 0\nfree r0";
    let trace = parse_trace(text, "story").expect("a trace");
    let written = write_trace(&trace);
    let mut bytes = Bytes::new(&written);
    assert!(read_config(&mut bytes).starts_with("config num_blocks=6 groups=full_attention:2"));
    let mut runner = Runner::new(trace.config.clone()).expect("a config");
    let mut calls = Vec::new();
    while !bytes.is_empty() {
        for (verb, words) in next_call(&mut bytes, &runner.state) {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            runner.call(verb, &words).expect("a call that can be read");
            calls.push(format!("{verb} {}", words.join(" ")).trim_end().to_owned());
        }
    }
    assert_eq!(calls, text.lines().skip(1).collect::<Vec<_>>());
}

#[test]
fn any_bytes_keep_the_invariants() {
    let corpus = corpus();
    let seconds = std::time::Duration::from_secs(SECONDS);
    let mut check = bolero::check!().with_max_len(MAX_BYTES);
    if std::env::var_os("BOLERO_RANDOM_TEST_TIME_MS").is_none() {
        check = check.with_test_time(seconds);
    }
    check.for_each(|input: &[u8]| {
        if let Err(Broken { trace, what }) = run(&continued(input, &corpus)) {
            panic!("{trace}\n# {what}");
        }
    });
}
