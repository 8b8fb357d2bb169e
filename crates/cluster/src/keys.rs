//! The keys of a projection in etcd. docs/OPERATIONS.md ("Failover") shows them to administrators.

use dray_rpc::server::ServerNumber;

/// Where everything of dray is.
const ROOT: &str = "/dray";

/// The keys of one projection.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    projection: String,
}

/// What a key is of.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Definition,
    Member(ServerNumber),
    Drained(ServerNumber),
    Quiesced,
    Quiet(ServerNumber),
    /// By the name of its export.
    Slice(String),
}

impl Keys {
    pub(crate) fn of(projection: &str) -> Keys {
        Keys { projection: projection.to_owned() }
    }

    /// Before everything of this projection.
    pub(crate) fn prefix(&self) -> String {
        format!("{ROOT}/{}/", self.projection)
    }

    pub(crate) fn definition(&self) -> String {
        self.prefix() + "definition"
    }

    pub(crate) fn members(&self) -> String {
        self.prefix() + "members/"
    }

    pub(crate) fn member(&self, server: ServerNumber) -> String {
        format!("{}{}", self.members(), server.0)
    }

    pub(crate) fn drained(&self, server: ServerNumber) -> String {
        format!("{}drained/{}", self.prefix(), server.0)
    }

    pub(crate) fn quiesced(&self) -> String {
        self.prefix() + "quiesced"
    }

    /// This server has carried out that.
    pub(crate) fn quiet(&self, server: ServerNumber) -> String {
        format!("{}quiet/{}", self.prefix(), server.0)
    }

    pub(crate) fn slices(&self) -> String {
        self.prefix() + "slices/"
    }

    /// Of the slice with an export of this name, which is `PROJECTION/A.S`.
    pub(crate) fn slice(&self, export: &str) -> String {
        let short = export.strip_prefix(&self.projection).and_then(|rest| rest.strip_prefix('/'));
        format!("{}{}", self.slices(), short.unwrap_or(export))
    }

    /// None: of nothing that this version knows.
    pub(crate) fn kind(&self, key: &[u8]) -> Option<KeyKind> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key.strip_prefix(&self.prefix())?;
        let number = |text: &str| text.parse().ok().map(ServerNumber);
        match rest.split_once('/') {
            None if rest == "definition" => Some(KeyKind::Definition),
            None if rest == "quiesced" => Some(KeyKind::Quiesced),
            Some(("members", server)) => Some(KeyKind::Member(number(server)?)),
            Some(("drained", server)) => Some(KeyKind::Drained(number(server)?)),
            Some(("quiet", server)) => Some(KeyKind::Quiet(number(server)?)),
            Some(("slices", slice)) => Some(KeyKind::Slice(format!("{}/{slice}", self.projection))),
            _ => None,
        }
    }
}

/// Behind all keys that begin with `prefix`, which ends with a slash.
pub(crate) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_distinguished() {
        let keys = Keys::of("scratch");
        let server = ServerNumber(12);
        for (key, text, kind) in [
            (keys.definition(), "/dray/scratch/definition", KeyKind::Definition),
            (keys.member(server), "/dray/scratch/members/12", KeyKind::Member(server)),
            (keys.drained(server), "/dray/scratch/drained/12", KeyKind::Drained(server)),
            (keys.quiesced(), "/dray/scratch/quiesced", KeyKind::Quiesced),
            (keys.quiet(server), "/dray/scratch/quiet/12", KeyKind::Quiet(server)),
            (
                keys.slice("scratch/1.2"),
                "/dray/scratch/slices/1.2",
                KeyKind::Slice("scratch/1.2".into()),
            ),
        ] {
            assert_eq!(key, text);
            assert_eq!(keys.kind(key.as_bytes()), Some(kind));
        }
        for other in ["/dray/scratch/members/x", "/dray/scratch/new", "/dray/scratch2/quiesced", ""]
        {
            assert_eq!(keys.kind(other.as_bytes()), None, "{other}");
        }
        assert_eq!(keys.kind(b"/dray/scratch/\xff"), None);
        assert_eq!(end_of("/dray/x/"), b"/dray/x0");
    }
}
