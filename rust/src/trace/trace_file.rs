// SPDX-License-Identifier: Apache-2.0
//! Text traces: readable stories of calls, each with everything that it must give.
//!
//! A line at the margin is a call, and the indented lines under it are its whole outcome: one line
//! less or more is a mismatch. Comments stand on lines of their own. Expected lines are not parsed:
//! the outcome is written as text and the texts are compared. The Python file shows an example.
//! Twin: kvcore/trace/trace_file.py.

use std::path::{Path, PathBuf};

use crate::trace::runner::Runner;
use crate::types::config::{Config, Duplicates, Eviction, Publish};
use crate::types::errors::Error;
use crate::types::groups::{Group, KINDS};
use crate::types::keys::Hashing;

/// Separators of words; lines end with a line feed.
const GAPS: [char; 3] = [' ', '\t', '\r'];
/// Most blocks of a tier, since the pools of a trace are held in memory.
const BLOCKS_MAX: u32 = 1 << 16;

/// One call of a trace and its expected outcome lines, without their indent.
#[derive(Debug)]
pub struct TraceLine {
    line: i64,
    pub(crate) verb: String,
    pub(crate) words: Vec<String>,
    expected: Vec<String>,
}

/// A parsed trace. source: named by errors, usually the file.
#[derive(Debug)]
pub struct Trace {
    source: String,
    pub(crate) config: Config,
    pub(crate) calls: Vec<TraceLine>,
}

impl Trace {
    fn error(&self, line: i64, reason: String) -> Error {
        Error::TraceError { source: self.source.clone(), line, reason }
    }
}

/// The trace of a file. Fails with TraceError.
pub fn read_trace(path: &Path) -> Result<Trace, Error> {
    let source = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match std::fs::read_to_string(path) {
        Ok(text) => parse_trace(&text, &source),
        Err(error) => Err(Error::TraceError { source, line: 0, reason: error.to_string() }),
    }
}

/// The trace of a text. Fails with TraceError, which has the line.
pub fn parse_trace(text: &str, source: &str) -> Result<Trace, Error> {
    let mut config = None;
    let mut calls: Vec<TraceLine> = Vec::new();
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (line, content) in (1..).zip(text.split('\n')) {
        let damaged = |reason: &str| {
            let (source, reason) = (source.to_owned(), reason.to_owned());
            Error::TraceError { source, line, reason }
        };
        let stripped = content.trim_matches(GAPS);
        if stripped.is_empty() || stripped.starts_with('#') {
            continue;
        }
        if content.starts_with(GAPS) {
            let last = calls.last_mut().ok_or_else(|| damaged("an outcome without a call"))?;
            last.expected.push(stripped.to_owned());
            continue;
        }
        let words = stripped.split(GAPS).filter(|word| !word.is_empty());
        let mut words = words.map(str::to_owned);
        let verb = words.next().unwrap_or_default();
        if verb == "config" {
            if config.is_some() {
                return Err(damaged("a second config"));
            }
            config = Some(parse_config(words).map_err(|reason| damaged(&reason))?);
        } else if config.is_none() {
            return Err(damaged("a call before the config"));
        } else {
            calls.push(TraceLine { line, verb, words: words.collect(), expected: Vec::new() });
        }
    }
    let source = source.to_owned();
    match config {
        Some(config) => Ok(Trace { source, config, calls }),
        None => Err(Error::TraceError { source, line: 1, reason: "there is no config".to_owned() }),
    }
}

/// Make the calls of a trace. Fails with TraceError at the first outcome that is not expected.
pub fn replay(trace: &Trace) -> Result<(), Error> {
    for (call, actual) in trace.calls.iter().zip(outcomes(trace)?) {
        if actual != call.expected {
            return Err(trace.error(call.line, difference(call, &actual)));
        }
    }
    Ok(())
}

/// The outcome lines that the calls of a trace really have. Fails with TraceError.
pub fn outcomes(trace: &Trace) -> Result<Vec<Vec<String>>, Error> {
    let mut runner = Runner::new(trace.config.clone())?;
    let mut actual = Vec::new();
    for call in &trace.calls {
        let words: Vec<&str> = call.words.iter().map(String::as_str).collect();
        let lines = runner.call(&call.verb, &words);
        actual.push(lines.map_err(|bad| trace.error(call.line, bad.0))?);
    }
    Ok(actual)
}

fn parse_config(words: impl Iterator<Item = String>) -> Result<Config, String> {
    let (mut config, mut unit) = (Config::new(0, 16, b"trace"), None);
    for word in words {
        let (name, value) =
            word.split_once('=').ok_or_else(|| format!("'{word}' is not name=value"))?;
        let count = || value.parse::<u32>().map_err(|_| format!("{name} takes a number"));
        let blocks = |count| match count {
            0..=BLOCKS_MAX => Ok(count),
            _ => Err(format!("{name} is {count}: a trace has at most {BLOCKS_MAX} blocks")),
        };
        let flag = || match value {
            "yes" => Ok(true),
            "no" => Ok(false),
            _ => Err(format!("{name} takes yes or no")),
        };
        match (name, value) {
            ("num_blocks", _) => config.num_blocks = blocks(count()?)?,
            ("block_size", _) => config.groups = vec![Group::new(count()?)],
            ("groups", _) => {
                config.groups = value.split(',').map(parse_group).collect::<Result<_, _>>()?;
            }
            ("floors", _) => {
                config.floors = value.split(',').map(parse_floor).collect::<Result<_, _>>()?;
                config.floors.sort();
            }
            ("num_host_blocks", _) => config.num_host_blocks = blocks(count()?)?,
            ("max_model_len", _) => config.max_model_len = Some(count()?),
            ("max_num_batched_tokens", _) => config.max_num_batched_tokens = Some(count()?),
            ("enable_caching", _) => config.enable_caching = flag()?,
            ("null_block", _) => config.null_block = flag()?,
            ("eviction", name) if Eviction::of_name(name).is_some() => {
                config.eviction = Eviction::of_name(name).unwrap_or(config.eviction);
            }
            ("duplicates", "keep") => config.duplicates = Duplicates::Keep,
            ("duplicates", "merge") => config.duplicates = Duplicates::Merge,
            ("num_preallocate_tokens", _) => config.num_preallocate_tokens = count()?,
            ("watermark_blocks", _) => config.watermark_blocks = count()?,
            ("use_eagle", _) => config.use_eagle = flag()?,
            ("enable_events", _) => config.enable_events = flag()?,
            ("record_new_blocks", _) => config.record_new_blocks = flag()?,
            ("hide_salts", _) => config.hide_salts = flag()?,
            ("epoch", _) => config.epoch = count()?,
            ("max_pinned_blocks", _) => config.max_pinned_blocks = Some(count()?),
            ("hash_block_size", _) => unit = Some(count()?),
            ("max_in_flight", _) => config.max_in_flight = count()?,
            ("publish", "scheduled") => config.publish = Publish::Scheduled,
            ("publish", "completed") => config.publish = Publish::Completed,
            ("hashing", name) if let Some(hashing) = Hashing::named(name) => {
                config.hashing = hashing;
            }
            _ => return Err(format!("the config takes no '{word}'")),
        }
    }
    if let Some(num_tokens) = unit {
        config.set_hash_block_size(num_tokens);
    }
    config.check().map_err(|error| error.to_string())?;
    Ok(config)
}

fn parse_floor(word: &str) -> Result<(String, u32), String> {
    let (salt, size) = word.rsplit_once(':').unwrap_or_default();
    let size = size.parse::<u32>().map_err(|_| format!("'{word}' is not salt:blocks"))?;
    Ok((salt.to_owned(), size))
}

fn parse_group(word: &str) -> Result<Group, String> {
    let bad = || format!("'{word}' is not kind:block_size[:window][+eagle][+zero]");
    let mut flags = word.split('+');
    let parts: Vec<&str> = flags.next().unwrap_or_default().split(':').collect();
    let number = |part: &str| part.parse::<u32>().map_err(|_| bad());
    let [kind, size, window @ ..] = &parts[..] else { return Err(bad()) };
    let mut group = Group::new(number(size)?);
    group.kind = *KINDS.iter().find(|each| each.name() == *kind).ok_or_else(bad)?;
    match window {
        [] => {}
        [drafts] if group.is_state() => group.draft_states = number(drafts)?,
        [window] => group.window = Some(number(window)?),
        _ => return Err(bad()),
    }
    for flag in flags {
        match flag {
            "eagle" => group.eagle = true,
            "zero" => group.zero_new_blocks = true,
            _ => return Err(bad()),
        }
    }
    Ok(group)
}

fn difference(call: &TraceLine, actual: &[String]) -> String {
    let lines = |lines: &[String]| match lines {
        [] => "\n  (nothing)".to_owned(),
        _ => lines.iter().map(|line| format!("\n  {line}")).collect(),
    };
    let words = call.words.join(" ");
    let (wanted, given) = (lines(&call.expected), lines(actual));
    format!("{} {words}\nmust give{wanted}\nbut gives{given}", call.verb)
}

/// The traces of the project, in every folder below `tests/traces`, by path.
pub(crate) fn project_traces() -> Vec<PathBuf> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the traces are in the repository") {
            let path = entry.expect("a folder can be listed").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "trace") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORY: &str = "\
config num_blocks=3 block_size=2 null_block=no
add_request r0 5-7
  = row 0
allocate_slots r0 3
  = blocks 0 1
  ! Allocate 0 1
  ! SetTable row 0: 0=0 1=1
";

    fn reason(text: &str) -> String {
        let replayed = parse_trace(text, "story").and_then(|trace| replay(&trace));
        replayed.expect_err("the story is wrong").to_string()
    }

    #[test]
    fn every_trace_of_the_project_holds_in_the_twin() {
        let paths = project_traces();
        assert!(!paths.is_empty(), "no trace was found");
        for path in paths {
            if let Err(error) = read_trace(&path).and_then(|trace| replay(&trace)) {
                panic!("{error}");
            }
        }
    }

    #[test]
    fn one_line_less_or_more_is_a_mismatch() {
        replay(&parse_trace(STORY, "story").unwrap()).unwrap();
        let less = STORY.replace("  ! Allocate 0 1\n", "");
        assert!(reason(&less).starts_with("story, line 4: allocate_slots r0 3\nmust give"));
        let more = format!("{STORY}  ! Touch 0\n");
        assert!(reason(&more).contains("! Touch 0\nbut gives"));
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        replay(&parse_trace(&format!("\u{feff}{STORY}"), "story").unwrap()).unwrap();
    }

    #[test]
    fn what_cannot_be_read_is_named_with_its_line() {
        assert_eq!(reason(""), "story, line 1: there is no config");
        assert_eq!(reason("free r0"), "story, line 1: a call before the config");
        assert_eq!(reason("config num_blocks"), "story, line 1: 'num_blocks' is not name=value");
        assert_eq!(
            reason("config num_blocks=2\n  = 1"),
            "story, line 2: an outcome without a call"
        );
        let unknown = "config num_blocks=2 block_size=2\nfree r0\nfly r0";
        assert_eq!(reason(unknown), "story, line 3: fly cannot take r0");
    }
}
