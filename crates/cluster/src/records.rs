//! What stands under the keys: JSON of one line, which an administrator reads with `etcdctl get`.

use std::fmt;
use std::io;

use dray_rpc::server::{PageCacheId, ServerNumber, SliceState};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of all records. One of another version is not read.
const VERSION: u32 = 1;
/// Longest record that is read, bytes. The longest that is written has the text of a definition.
const RECORD_MAX_BYTES: usize = 64 << 10;

/// A record with its version, which stands first.
#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    v: u32,
    #[serde(flatten)]
    record: T,
}

/// The definition that the servers of a projection have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DefinitionRecord {
    /// 16 hexadecimal digits.
    pub(crate) fingerprint: String,
    /// As clients get it.
    pub(crate) text: String,
}

/// A server that is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// The server's address in the definition.
    pub server: String,
    /// The holder of the state directory that the server uses. Two processes of one holder cannot run at a time.
    pub holder: String,
    /// When it joined, seconds since 1970.
    pub since: u64,
}

/// Why new calls wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuiesceRecord {
    /// The server whose administrator asked for it.
    pub by: String,
    /// Since when, seconds since 1970.
    pub since: u64,
}

/// A server at which no call is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QuietRecord {
    /// The revision of the mark for which that is so.
    pub(crate) quiesced: u64,
}

/// A server that is to serve nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DrainRecord {
    /// Since when, seconds since 1970.
    pub(crate) since: u64,
}

/// The state of a slice.
#[derive(Serialize, Deserialize)]
pub(crate) struct SliceRecord {
    primary: u16,
    epoch: u64,
    in_step: bool,
    loss: u64,
    recovering: bool,
    /// 16 hexadecimal digits.
    page_cache: String,
}

impl From<SliceState> for SliceRecord {
    fn from(state: SliceState) -> SliceRecord {
        let SliceState { primary, epoch, in_step, loss, recovering, page_cache } = state;
        let page_cache = format!("{:016x}", page_cache.0);
        SliceRecord { primary: primary.0, epoch, in_step, loss, recovering, page_cache }
    }
}

/// Errors: the text is no state of this version.
pub(crate) fn read_slice(text: &[u8]) -> Result<SliceState, Unreadable> {
    let SliceRecord { primary, epoch, in_step, loss, recovering, page_cache } = read(text)?;
    let digits = |_| Unreadable(format!("a page cache in etcd that is no number: {page_cache}"));
    let page_cache = PageCacheId(u64::from_str_radix(&page_cache, 16).map_err(digits)?);
    let primary = ServerNumber(primary);
    Ok(SliceState { primary, epoch, in_step, loss, recovering, page_cache })
}

/// A record that this version cannot read.
#[derive(Debug)]
pub(crate) struct Unreadable(String);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Unreadable> for io::Error {
    fn from(why: Unreadable) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, why.0)
    }
}

/// The text of a record.
pub(crate) fn written<T: Serialize>(record: T) -> String {
    let text = serde_json::to_string(&Versioned { v: VERSION, record });
    text.expect("our own records have nothing but text, numbers and truth values")
}

/// Errors: the text is no record of this version.
pub(crate) fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, Unreadable> {
    if text.len() > RECORD_MAX_BYTES {
        return Err(Unreadable(format!("a record of {} bytes in etcd", text.len())));
    }
    let wrong = |error: serde_json::Error| {
        let start = String::from_utf8_lossy(&text[..text.len().min(80)]).into_owned();
        Unreadable(format!("a record in etcd that is none of dray's: {error}: {start}"))
    };
    #[derive(Deserialize)]
    struct Version {
        v: u32,
    }
    let Version { v } = serde_json::from_slice(text).map_err(wrong)?;
    if v != VERSION {
        return Err(Unreadable(format!(
            "a record in etcd of version {v}; this dray reads {VERSION}"
        )));
    }
    let Versioned { record, .. } = serde_json::from_slice(text).map_err(wrong)?;
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_slice_is_a_line_that_people_can_read() {
        let state = SliceState {
            primary: ServerNumber(2),
            epoch: u64::MAX,
            in_step: true,
            loss: 1,
            recovering: false,
            page_cache: PageCacheId(0xfeed),
        };
        let text = written(SliceRecord::from(state));
        assert_eq!(
            text,
            r#"{"v":1,"primary":2,"epoch":18446744073709551615,"in_step":true,"loss":1,"recovering":false,"page_cache":"000000000000feed"}"#
        );
        assert_eq!(read_slice(text.as_bytes()).unwrap(), state);
    }

    #[test]
    fn records_of_others_are_errors() {
        for (text, words) in [
            (r#"{"v":2,"primary":"x"}"#, "of version 2"),
            (r#"{"v":1,"primary":70000}"#, "none of dray's"),
            (
                r#"{"v":1,"primary":7,"epoch":1,"in_step":true,"loss":1,"recovering":false,"page_cache":"x"}"#,
                "no number",
            ),
            (r#"{"primary":1}"#, "none of dray's"),
            ("", "none of dray's"),
            ("\u{fffd}", "none of dray's"),
        ] {
            let said = read_slice(text.as_bytes()).err().unwrap().to_string();
            assert!(said.contains(words), "{said}");
        }
        let long = vec![b' '; RECORD_MAX_BYTES + 1];
        assert!(read_slice(&long).is_err());
    }
}
