//! Small pieces of text and bytes.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// The last `lines` lines of `text`.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.trim_end().lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The last `lines` lines of a file, at most its last 64 KiB. A file that cannot be read counts as empty: the answer
/// is for an error message about something else.
pub(crate) fn tail_of_file(path: &Path, lines: usize) -> String {
    const MOST: u64 = 64 * 1024;
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        if file.seek(SeekFrom::Start(length.saturating_sub(MOST))).is_ok() {
            // What was read before an error is still worth showing.
            let _ = file.read_to_end(&mut bytes);
        }
    }
    tail(&String::from_utf8_lossy(&bytes), lines)
}

/// FNV-1a: the same on every run and every release, unlike the hashers of std.
pub(crate) fn fingerprint(parts: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        for byte in part.as_bytes().iter().chain(&[0]) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}

/// A random id in Kafka's notation: 128 bits, base64url without padding.
pub(crate) fn random_id() -> String {
    let random = || RandomState::new().build_hasher().finish();
    encode_id(u128::from(random()) << 64 | u128::from(random()))
}

fn encode_id(id: u128) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    (0..22)
        .map(|place| {
            // 22 digits of 6 bits are 132 bits: the last one is filled up with four zero bits.
            let digit = if place < 21 { id >> (122 - 6 * place) } else { id << 4 };
            char::from(DIGITS[usize::from(digit as u8 & 63)])
        })
        .collect()
}

/// A value of a Java properties file.
pub(crate) fn escape_property(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for (place, letter) in value.chars().enumerate() {
        match letter {
            '\\' => escaped.push_str("\\\\"),
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            ' ' if place == 0 => escaped.push_str("\\ "),
            ' '..='~' => escaped.push(letter),
            _ => {
                let mut units = [0; 2];
                for unit in letter.encode_utf16(&mut units) {
                    escaped.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
    escaped
}

/// Writes an executable shell script, by a process of its own: a file that this process has open for writing may be so
/// in a child of another thread too, for a moment, and then cannot be executed.
#[cfg(test)]
pub(crate) fn script(path: &Path, content: &str) {
    let status = std::process::Command::new("/bin/sh")
        .args(["-c", r##"printf '#!/bin/sh\n%s\n' "$1" >"$2" && chmod +x "$2""##])
        .args(["sh", content])
        .arg(path)
        .status()
        .unwrap();
    assert!(status.success());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_is_the_last_lines() {
        assert_eq!(tail("a\nb\nc\n", 2), "b\nc");
        assert_eq!(tail("a\n", 2), "a");
        assert_eq!(tail("", 2), "");
    }

    #[test]
    fn a_tail_of_a_long_file_is_read_from_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text: String = (0..50_000).map(|line| format!("line {line}\n")).collect();
        std::fs::write(file.path(), text).unwrap();
        assert_eq!(tail_of_file(file.path(), 2), "line 49998\nline 49999");
        assert_eq!(tail_of_file(Path::new("/nonexistent"), 2), "");
    }

    #[test]
    fn ids_are_base64url() {
        assert_eq!(encode_id(0), "AAAAAAAAAAAAAAAAAAAAAA");
        assert_eq!(encode_id(u128::MAX), "_____________________w");
        // 00 01 02 .. 0f
        assert_eq!(encode_id(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f), "AAECAwQFBgcICQoLDA0ODw");
        assert_ne!(random_id(), random_id());
    }

    #[test]
    fn a_fingerprint_depends_on_the_borders_of_the_parts() {
        assert_eq!(fingerprint(&["ab", "c"]), fingerprint(&["ab", "c"]));
        assert_ne!(fingerprint(&["ab", "c"]), fingerprint(&["a", "bc"]));
    }

    #[test]
    fn property_values_are_escaped() {
        assert_eq!(escape_property(r"C:\data"), r"C:\\data");
        assert_eq!(escape_property(" a b"), r"\ a b");
        assert_eq!(escape_property("a\nb=ü"), r"a\nb=\u00fc");
        assert_eq!(escape_property("𝄞"), r"\ud834\udd1e");
    }
}
