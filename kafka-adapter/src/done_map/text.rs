//! Bytes as text: 13 bits in two characters out of 91.
//!
//! 91² = 8,281 pairs hold 13 bits, which is 8 % more than base64 and 1.5 % more than base85 puts into the
//! same length, and the length depends on the number of bytes alone.

/// Printable ASCII without the space, both quotes and the backslash: it needs no quoting in JSON.
pub(super) const ALPHABET: &[u8; 91] =
    b"!#$%&()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{|}~";

const PAIR_BITS: usize = 13;
const LAST_BITS: usize = 6;

const VALUES: [u8; 128] = {
    let mut values = [u8::MAX; 128];
    let mut at = 0;
    while at < ALPHABET.len() {
        values[ALPHABET[at] as usize] = at as u8;
        at += 1;
    }
    values
};

/// Characters for so many bytes.
pub(super) fn len(bytes: usize) -> usize {
    let bits = bytes * 8;
    let last = match bits % PAIR_BITS {
        0 => 0,
        1..=LAST_BITS => 1,
        _ => 2,
    };
    bits / PAIR_BITS * 2 + last
}

/// The most bytes that fit into so many characters.
pub(super) fn capacity(characters: usize) -> usize {
    (characters / 2 * PAIR_BITS + characters % 2 * LAST_BITS) / 8
}

/// Appends the text of `bytes`.
pub(super) fn encode<'a>(bytes: impl Iterator<Item = &'a u8>, out: &mut String) {
    let mut pending = 0_u32;
    let mut bits = 0;
    let mut character = |value: u32| out.push(char::from(ALPHABET[value as usize]));
    for &byte in bytes {
        pending = pending << 8 | u32::from(byte);
        bits += 8;
        if bits >= PAIR_BITS {
            bits -= PAIR_BITS;
            let pair = pending >> bits;
            character(pair / 91);
            character(pair % 91);
            pending &= (1 << bits) - 1;
        }
    }
    // The last bits are filled up with zeros.
    match bits {
        0 => {}
        1..=LAST_BITS => character(pending << (LAST_BITS - bits)),
        _ => {
            let pair = pending << (PAIR_BITS - bits);
            character(pair / 91);
            character(pair % 91);
        }
    }
}

/// The bytes of a text, or the position of the first character that [`encode`] would not have written.
pub(super) fn decode(text: &[u8]) -> Result<Vec<u8>, usize> {
    let mut out = Vec::with_capacity(capacity(text.len()));
    let mut pending = 0_u32;
    let mut bits = 0;
    for (at, pair) in text.chunks(2).enumerate() {
        let mut value = 0;
        for (character, position) in pair.iter().zip(at * 2..) {
            match VALUES.get(usize::from(*character)) {
                Some(&digit) if digit != u8::MAX => value = value * 91 + u32::from(digit),
                _ => return Err(position),
            }
        }
        let width = if pair.len() == 2 { PAIR_BITS } else { LAST_BITS };
        if value >> width != 0 {
            return Err(at * 2);
        }
        pending = pending << width | value;
        bits += width;
        while bits >= 8 {
            bits -= 8;
            out.push((pending >> bits) as u8);
        }
        pending &= (1 << bits) - 1;
    }
    // Each text has one meaning and each meaning one text.
    if pending != 0 || len(out.len()) != text.len() {
        return Err(text.len().saturating_sub(1));
    }
    Ok(out)
}
