//! Texts of the Parallel Consumer's own encoders, and what cannot be its text.
//!
//! The texts were written by the encoders of the library `parallel-consumer-core` 0.5.3.3, all of them forced
//! for each input, and read back by its own decoder.

// A list of one range is meant.
#![allow(clippy::single_range_in_vec_init)]

use proptest::prelude::*;

use super::*;

type Texts = &'static [(&'static str, &'static str)];

const THREE: Texts = &[
    ("BitSet", "bAAK3AMA"),
    ("BitSetCompressed", "YSi1L/0AWCkAAAAK3AMA"),
    ("RunLength", "bgACAAMAAQAE"),
    ("RunLengthCompressed", "Sii1L/0AWEEAAAACAAMAAQAE"),
    ("BitSetV2", "bwAAAArcAwA="),
    ("BitSetV2Compressed", "cyi1L/0AWDkAAAAAAArcAwA="),
    ("RunLengthV2", "ZQAAAAIAAAADAAAAAQAAAAQ="),
    ("RunLengthV2Compressed", "cCi1L/0AWIEAAAAAAAIAAAADAAAAAQAAAAQ="),
];

const NONE: Texts = &[
    ("BitSet", "bAAAAA=="),
    ("BitSetCompressed", "YSi1L/0AWBkAAAAAAA=="),
    ("RunLength", "bgAA"),
    ("RunLengthCompressed", "Sii1L/0AWBEAAAAA"),
    ("BitSetV2", "bwAAAAAA"),
    ("BitSetV2Compressed", "cyi1L/0AWCkAAAAAAAAA"),
    ("RunLengthV2", "ZQAAAAA="),
    ("RunLengthV2Compressed", "cCi1L/0AWCEAAAAAAAA="),
];

const STUCK: Texts = &[
    ("BitSetV2Compressed", "cyi1L/0AWH0AAEAAAYah/v8BAAEAz5AHRQ=="),
    ("RunLengthV2", "ZQAAAAEAAYag"),
    ("RunLengthV2Compressed", "cCi1L/0AWEEAAAAAAAEAAYag"),
];

const ALTERNATING: Texts = &[
    ("BitSet", "bAApqqqqqqoAAA=="),
    ("BitSetCompressed", "YSi1L/0AWEkAAAApqqqqqqoAAA=="),
    (
        "RunLength",
        "bgABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAEAAQABAAE=",
    ),
    ("RunLengthCompressed", "Sii1L/0AWEUAABAAAQEAHeqw"),
    ("BitSetV2", "bwAAACmqqqqqqgAA"),
    ("BitSetV2Compressed", "cyi1L/0AWFkAAAAAACmqqqqqqgAA"),
    (
        "RunLengthV2",
        "ZQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAABAAAAAQAAAAEAAAAB",
    ),
    ("RunLengthV2Compressed", "cCi1L/0AWF0AACAAAAABAQCdKUcE"),
];

const LONG: Texts = &[
    ("BitSetV2Compressed", "cyi1L/0AWKUAAEAAARFx/v8BAAIAFKERpwcS0YMi"),
    ("RunLengthV2", "ZQAAAAEAAIi3AAAAAQAAiLg="),
    ("RunLengthV2Compressed", "cCi1L/0AWIEAAAAAAAEAAIi3AAAAAQAAiLg="),
];

const HUNDRED: Texts = &[
    ("BitSetCompressed", "YSi1L/0AWJ0AAEALuf7/7/8AAAMAWzwVABHDgAg="),
    (
        "RunLength",
        "bgABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwABAGMAAQBjAAEAYwAB",
    ),
    ("RunLengthCompressed", "Sii1L/0AWF0AACAAAQBjAQDz1BEB"),
    ("BitSetV2Compressed", "cyi1L/0AWK0AAFAAAAu5/v/v/wAAAwBbPBUAEcOgCA=="),
    ("RunLengthV2Compressed", "cCi1L/0AWH0AAEAAAAABAAAAYwEA6VGFCw=="),
];

const ALTERNATING_100_000: Texts = &[
    ("RunLengthCompressed", "Sii1L/0AWFQAABAAAQEA+//lDgtNAAAIAAEAPA05EAI="),
    ("BitSetV2Compressed", "cyi1L/0AWG0AADAAAYagqgABANCQB1o="),
    (
        "RunLengthV2Compressed",
        "cCi1L/0AWGQAACAAAAABAQD5/+eOCEwAAAgAAQD8/zkQAkwAAAgAAQD8/zkQAkUAAAgAAQB82gMh",
    ),
];

fn expect(texts: Texts, committed: i64, ranges: impl IntoIterator<Item = Range<i64>>) {
    let mut expected = DoneMap::new(committed);
    for range in ranges {
        expected.push_range(range).unwrap();
    }
    for (encoding, text) in texts {
        assert_eq!(decode(committed, text).as_ref(), Ok(&expected), "{encoding}");
    }
}

#[test]
fn texts_of_its_encoders_are_read() {
    // 500, 501 and 505 of 500..=509 were unfinished.
    expect(THREE, 500, [502..505, 506..510]);
    // Nothing above the committed offset.
    expect(NONE, 500, []);
    // One stuck record.
    expect(STUCK, 1_000, [1_001..101_001]);
    // Every second, from the committed offset on.
    expect(ALTERNATING, 7, (0..20).map(|at| 8 + at * 2..9 + at * 2));
    expect(ALTERNATING_100_000, 0, (0..50_000).map(|at| 1 + at * 2..2 + at * 2));
    // Two unfinished far apart, above 2³².
    let base = 123_456_789_012;
    expect(LONG, base, [base + 1..base + 35_000, base + 35_001..base + 70_001]);
    // Every hundredth.
    expect(HUNDRED, 0, (0..30).map(|at| at * 100 + 1..at * 100 + 100));
    // Each encoding has a text.
    let encodings: std::collections::BTreeSet<_> = [THREE, NONE, STUCK, LONG, HUNDRED]
        .into_iter()
        .flatten()
        .map(|(encoding, _)| encoding)
        .collect();
    assert_eq!(encodings.len(), 8);
}

#[test]
fn none_means_an_empty_map() {
    assert_eq!(decode(9, ""), Ok(DoneMap::new(9)));
}

fn decode_bytes(bytes: &[u8]) -> Result<DoneMap, Ignored> {
    decode(500, &STANDARD.encode(bytes))
}

#[test]
fn foreign_texts_are_ignored() {
    // The first bytes of Kafka Streams, and the byte array, which no version writes.
    for magic in [0, 1, 2, b'L', 0xEE, b'x'] {
        assert_eq!(decode_bytes(&[magic, 0, 0, 0]), Err(Ignored::Foreign));
    }
    for text in ["~1abc", "bAAK3AM", "not base64!", "=", "\u{e9}"] {
        assert_eq!(decode(500, text), Err(Ignored::Foreign), "{text}");
    }
    assert_eq!(decode(-1, "bAAK3AMA"), Err(Ignored::NoCommittedOffset { committed: -1 }));
}

#[test]
fn content_that_its_encoders_do_not_write_is_ignored() {
    let cases: [&[u8]; 8] = [
        b"l",                     // no length
        b"l\xFF\xFF\x00",         // a negative one
        b"o\x80\x00\x00\x00\x00", // the same, wide
        b"l\x00\x08\x01\x00",     // the committed offset finished
        b"n\x00\x00\x00\x01",     // the same, as run lengths
        b"n\x00\x01\x00",         // half a run length
        b"e\xFF\xFF\xFF\xFF",     // a negative one
        b"a\x28\xB5\x2F\xFD",     // a frame without blocks
    ];
    for bytes in cases {
        let found = decode_bytes(bytes);
        assert!(matches!(found, Err(Ignored::Malformed { .. })), "{bytes:?}: {found:?}");
    }
    let above = STANDARD.encode(b"e\x00\x00\x00\x01\x7F\xFF\xFF\xFF");
    assert!(decode(i64::MAX - 1_000, &above).is_err());
}

#[test]
fn bits_beyond_the_length_and_missing_bytes_mean_nothing() {
    let ranges = |bytes: &[u8]| decode_bytes(bytes).unwrap().ranges().to_vec();
    assert_eq!(ranges(b"l\x00\x03\xFE\xFF"), [501..503]);
    assert_eq!(ranges(b"o\x7F\xFF\xFF\xFF\xFE\x01"), [501..509]);
    assert_eq!(ranges(b"l\x00\x40"), []);
}

/// Frames that blow up: blocks that repeat one byte 128 Ki times.
fn bomb(magic: u8, blocks: usize, byte: u8, window: u8) -> Vec<u8> {
    let mut bytes = vec![magic, 0x28, 0xB5, 0x2F, 0xFD, 0x00, window];
    for block in (0..blocks).rev() {
        let header = (128_u32 << 10) << 3 | 1 << 1 | u32::from(block == 0);
        bytes.extend(&header.to_le_bytes()[..3]);
        bytes.push(byte);
    }
    bytes
}

#[test]
fn frames_that_blow_up_are_ignored() {
    for magic in [b'a', b's', b'J', b'p'] {
        assert_eq!(
            decode_bytes(&bomb(magic, 700, 0x01, 0x58)),
            Err(Ignored::TooLarge { limit: MAX_DECOMPRESSED })
        );
        // A window of terabytes.
        assert!(matches!(
            decode_bytes(&bomb(magic, 1, 0x01, 0xFF)),
            Err(Ignored::Malformed { .. })
        ));
    }
    // 4 MiB of bits by turns: within the bytes, but 16 million ranges.
    assert_eq!(
        decode_bytes(&bomb(b's', 32, 0x2A, 0x58)),
        Err(Ignored::TooManyRanges { limit: MAX_RANGES })
    );
    // Long runs stay ranges.
    let long = decode_bytes(&bomb(b'p', 1, 0x7F, 0x58)).unwrap();
    assert_eq!(long.ranges().len(), 16 << 10);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_stay_bounded(
        base in 0..i64::MAX, magic in prop::sample::select(b"laosnJep".to_vec()),
        bytes in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        for prefix in [&[][..], &[0x28, 0xB5, 0x2F, 0xFD, 0x00, 0x58]] {
            let all: Vec<u8> = [&[magic], prefix, &bytes].concat();
            if let Ok(map) = decode(base, &STANDARD.encode(all)) {
                prop_assert!(map.ranges().len() <= MAX_RANGES);
                prop_assert!(map.ranges().iter().all(|range| range.start > base));
            }
        }
    }

    /// Damaged texts of its compressor: no panic, no unbounded map.
    #[test]
    fn damaged_texts_stay_bounded(
        pick in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let texts: Vec<_> = [THREE, ALTERNATING_100_000, LONG, HUNDRED].concat();
        let mut bytes = STANDARD.decode(texts[pick.index(texts.len())].1).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(map) = decode(0, &STANDARD.encode(bytes)) {
            prop_assert!(map.ranges().len() <= MAX_RANGES && !map.contains(0));
        }
    }

    /// Whatever was finished, bit by bit and as run lengths.
    #[test]
    fn bits_and_run_lengths_agree_with_the_offsets(done in prop::collection::vec(any::<bool>(), 0..300)) {
        let mut bytes = vec![0; done.len() / 8 + 2];
        let mut runs = vec![0_u16];
        let mut expected = DoneMap::new(40);
        for (at, done) in std::iter::once(false).chain(done).enumerate() {
            if done {
                bytes[at / 8] |= 1 << (at % 8);
                expected.push(40 + at as i64).unwrap();
            }
            if done != (runs.len() % 2 == 0) {
                runs.push(0);
            }
            *runs.last_mut().unwrap() += 1;
        }
        bytes.splice(..0, [b'l', 1, 0x90]);
        prop_assert_eq!(decode(40, &STANDARD.encode(bytes)), Ok(expected.clone()));
        let runs: Vec<u8> = std::iter::once(b'n').chain(runs.into_iter().flat_map(u16::to_be_bytes)).collect();
        prop_assert_eq!(decode(40, &STANDARD.encode(runs)), Ok(expected.clone()));
    }
}
