// SPDX-License-Identifier: Apache-2.0
//! Fields of errors, and how messages show them: as Python literals.

use std::fmt;

/// A field of an error, in a form that every language has.
#[derive(Clone, PartialEq, Eq)]
pub enum Field {
    /// Nothing.
    Missing,
    /// Yes or no.
    Flag(bool),
    /// A number.
    Int(i64),
    /// A number that may be larger.
    Long(u64),
    /// A text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Numbers, in order.
    Ints(Vec<i64>),
    /// Texts, in order.
    Texts(Vec<String>),
}

impl From<bool> for Field {
    fn from(value: bool) -> Self {
        Field::Flag(value)
    }
}

impl From<u32> for Field {
    fn from(value: u32) -> Self {
        Field::Int(value.into())
    }
}

impl From<u64> for Field {
    fn from(value: u64) -> Self {
        Field::Long(value)
    }
}

impl From<i64> for Field {
    fn from(value: i64) -> Self {
        Field::Int(value)
    }
}

impl From<&str> for Field {
    fn from(value: &str) -> Self {
        Field::Text(value.to_owned())
    }
}

impl From<String> for Field {
    fn from(value: String) -> Self {
        Field::Text(value)
    }
}

impl From<Option<i64>> for Field {
    fn from(value: Option<i64>) -> Self {
        value.map_or(Field::Missing, Field::Int)
    }
}

impl From<Vec<i64>> for Field {
    fn from(value: Vec<i64>) -> Self {
        Field::Ints(value)
    }
}

impl From<Vec<String>> for Field {
    fn from(value: Vec<String>) -> Self {
        Field::Texts(value)
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Field::Text(value) => write!(f, "{value}"),
            _ => write!(f, "{self:?}"),
        }
    }
}

/// As a Python literal.
impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Field::Missing => write!(f, "None"),
            Field::Flag(value) => write!(f, "{}", if *value { "True" } else { "False" }),
            Field::Int(value) => write!(f, "{value}"),
            Field::Long(value) => write!(f, "{value}"),
            Field::Text(value) => write!(f, "{}", repr(value)),
            Field::Bytes(value) => write!(f, "{}", bytes_repr(value)),
            Field::Ints(values) => write!(f, "{values:?}"),
            Field::Texts(values) => {
                let quoted: Vec<String> = values.iter().map(|each| repr(each)).collect();
                write!(f, "[{}]", quoted.join(", "))
            }
        }
    }
}

/// A text as a Python literal, the form in which messages name a request.
#[must_use]
pub fn repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut shown = String::with_capacity(text.len() + 2);
    shown.push(quote);
    for each in text.chars() {
        match each {
            '\\' => shown.push_str("\\\\"),
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            _ if each == quote => shown.extend(['\\', each]),
            _ if is_printable(each) => shown.push(each),
            _ => shown.push_str(&match u32::from(each) {
                code @ ..0x100 => format!("\\x{code:02x}"),
                code @ ..0x1_0000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    shown.push(quote);
    shown
}

/// Bytes as a Python literal.
#[must_use]
pub fn bytes_repr(bytes: &[u8]) -> String {
    let quote = if bytes.contains(&b'\'') && !bytes.contains(&b'"') { b'"' } else { b'\'' };
    let mut shown = String::from("b");
    shown.push(char::from(quote));
    for &each in bytes {
        match each {
            b'\\' => shown.push_str("\\\\"),
            b'\n' => shown.push_str("\\n"),
            b'\r' => shown.push_str("\\r"),
            b'\t' => shown.push_str("\\t"),
            _ if each == quote => shown.extend(['\\', char::from(each)]),
            0x20..0x7f => shown.push(char::from(each)),
            _ => shown.push_str(&format!("\\x{each:02x}")),
        }
    }
    shown.push(char::from(quote));
    shown
}

/// By Rust's own table for `escape_debug`, which leaves a combining mark alone behind a letter.
fn is_printable(each: char) -> bool {
    each.is_ascii_graphic()
        || ['a', each].iter().collect::<String>().escape_debug().nth(1) == Some(each)
}
