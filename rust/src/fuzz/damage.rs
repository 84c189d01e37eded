// SPDX-License-Identifier: Apache-2.0
//! Damaged bytes: real ones whose parts were changed, cut, copied or put elsewhere.
//!
//! What is changed are the fields of a sample, so that most of the damage is behind the first check
//! of a decoder. Any bytes say what is done, so that the fuzzer finds small damage.
//! tests/bytes/damage.py does the same for the Python decoders.

/// Numbers at which counts go wrong.
const NUMBERS: [u64; 11] =
    [0, 1, 2, 127, 255, 256, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1, u64::MAX];

/// Real bytes, as the fields that they consist of.
pub(super) type Sample = Vec<Vec<u8>>;

/// The fields that start at these places.
pub(super) fn split_at(data: &[u8], mut starts: Vec<usize>) -> Sample {
    starts.extend([0, data.len()]);
    starts.sort_unstable();
    starts.dedup();
    starts.windows(2).map(|pair| data[pair[0]..pair[1]].to_vec()).collect()
}

/// The words, gaps and signs of a text.
pub(super) fn split_words(text: &str) -> Sample {
    let kind = |byte: u8| match byte {
        b' ' => 0,
        _ if byte.is_ascii_alphanumeric() || byte == b'_' => 1,
        _ => 2 + u16::from(byte),
    };
    let words = text.as_bytes().chunk_by(|before, after| kind(*before) == kind(*after));
    words.map(<[u8]>::to_vec).collect()
}

/// Choices, taken from bytes; zeros behind the last one.
struct Choices<'a>(std::slice::Iter<'a, u8>);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        self.0.next().copied().unwrap_or(0)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::from(u16::from_le_bytes([self.byte(), self.byte()])) % end.max(1)
    }
}

/// The damaged bytes that an input stands for. words: what else may stand for a field of a text.
pub(super) fn damaged(input: &[u8], samples: &[Sample], words: &[&str]) -> Vec<u8> {
    let mut choices = Choices(input.iter());
    let mut fields = samples[choices.below(samples.len())].clone();
    for _ in 0..choices.below(5) {
        change(&mut choices, &mut fields, samples, words);
    }
    let mut data = fields.concat();
    if choices.byte() == 1 {
        data.truncate(choices.below(data.len() + 1));
    }
    data
}

/// Change one thing.
fn change(choices: &mut Choices, fields: &mut Sample, samples: &[Sample], words: &[&str]) {
    if fields.is_empty() {
        fields.push(vec![0]);
    }
    let at = choices.below(fields.len());
    let few = [1, 1, 1, 2, 4, 10][choices.below(6)];
    let end = fields.len().min(at + few);
    match choices.below(8) {
        0 if !fields[at].is_empty() => {
            let place = choices.below(fields[at].len());
            fields[at][place] ^= 1 << (choices.byte() % 8);
        }
        0 | 1 => fields[at] = word(choices, &fields[at], samples, words),
        2 => {
            let word = word(choices, &fields[at], samples, words);
            fields.insert(at, word);
        }
        3 => _ = fields.drain(at..end),
        4 => {
            let copy = fields[at..end].to_vec();
            fields.splice(at..at, copy);
        }
        5 => {
            let other = choices.below(fields.len());
            fields.swap(at, other);
        }
        6 => {
            let other = &samples[choices.below(samples.len())];
            let there = if choices.byte() < 128 { at } else { choices.below(other.len()) };
            fields.splice(at.., other[there.min(other.len())..].iter().cloned());
        }
        _ => count(choices, &mut fields[at]),
    }
}

/// Something for the place of a field.
fn word(choices: &mut Choices, like: &[u8], samples: &[Sample], words: &[&str]) -> Vec<u8> {
    if !words.is_empty() && choices.byte() < 128 {
        return words[choices.below(words.len())].as_bytes().to_vec();
    }
    if choices.byte() < 80 {
        let other = &samples[choices.below(samples.len())];
        return other.get(choices.below(other.len())).cloned().unwrap_or_default();
    }
    let size = if matches!(like.len(), 1 | 4 | 8) { like.len() } else { 4 };
    NUMBERS[choices.below(NUMBERS.len())].to_le_bytes()[..size].to_vec()
}

/// Make a number one more or less.
fn count(choices: &mut Choices, field: &mut [u8]) {
    let add = if choices.byte() < 128 { 1 } else { 255 };
    for byte in field {
        let (sum, carries) = byte.overflowing_add(add);
        *byte = sum;
        if carries == (add == 255) {
            break;
        }
    }
}
