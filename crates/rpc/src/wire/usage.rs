//! What classes of calls use at one server of a projection, for the others that keep limits with it. It is
//! the content of a batch ([`BatchHead`](super::BatchHead)).

use crate::wire::codec::{Input, Malformed, Wire, wire_struct};

/// Classes in one batch.
pub const USAGE_MAX: usize = 4096;
/// Longest name of a rule, and of a class; bytes.
const NAME_MAX_BYTES: usize = 256;

wire_struct! {
    /// What one class used of late.
    UsageEntry {
        /// The rule; empty: the export as a whole.
        rule: String,
        /// The class among those of the rule.
        value: String,
        /// Of what has work there, thousandths.
        weight_milli: u64,
        /// Bytes a second.
        bytes_per_s: u64,
        /// Calls a second.
        calls_per_s: u64,
        /// Bits of [`UsageEntry::HELD_BYTES`] and the others.
        flags: u8,
    }
}

impl UsageEntry {
    /// A limit of bytes held its calls up.
    pub const HELD_BYTES: u8 = 1;
    /// A limit of calls held its calls up.
    pub const HELD_CALLS: u8 = 2;
    /// Calls of the class wait.
    pub const WAITING: u8 = 4;
}

/// Appends them; beyond [`USAGE_MAX`] they are left out.
pub fn put_usage(entries: &[UsageEntry], out: &mut Vec<u8>) {
    let entries = &entries[..entries.len().min(USAGE_MAX)];
    (entries.len() as u32).put(out);
    entries.iter().for_each(|entry| entry.put(out));
}

/// Takes them off again. Errors: too many, or too long a name.
pub fn get_usage(input: &mut Input<'_>) -> Result<Vec<UsageEntry>, Malformed> {
    let count = input.get::<u32>()? as usize;
    if count > USAGE_MAX {
        return Err(Malformed("the usage of too many classes"));
    }
    let one = |input: &mut Input<'_>| {
        let entry: UsageEntry = input.get()?;
        match entry.rule.len().max(entry.value.len()) <= NAME_MAX_BYTES {
            true => Ok(entry),
            false => Err(Malformed("a class of too long a name")),
        }
    };
    (0..count).map(|_| one(input)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_bounded() {
        let entry = |rule: &str| UsageEntry {
            rule: rule.to_owned(),
            value: "7".to_owned(),
            weight_milli: 1000,
            bytes_per_s: 1 << 40,
            calls_per_s: 3,
            flags: UsageEntry::HELD_CALLS,
        };
        let put = |entries: &[UsageEntry]| {
            let mut out = Vec::new();
            put_usage(entries, &mut out);
            out
        };
        let out = put(&[entry("users"), entry("")]);
        assert_eq!(get_usage(&mut Input(&out)), Ok(vec![entry("users"), entry("")]));
        assert!(get_usage(&mut Input(&out[..out.len() - 1])).is_err());
        assert!(get_usage(&mut Input(&put(&[entry(&"x".repeat(257))]))).is_err());
        let many = put(&vec![entry("x"); USAGE_MAX + 1]);
        assert_eq!(get_usage(&mut Input(&many)).unwrap().len(), USAGE_MAX);
        assert!(get_usage(&mut Input(&(USAGE_MAX as u32 + 1).to_le_bytes())).is_err());
    }
}
