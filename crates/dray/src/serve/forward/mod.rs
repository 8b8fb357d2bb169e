//! The kind of exports that other servers have: a server of such an export is their client (ADR 0044).
//!
//! All sessions of an export are the server's, whatever client of its own a call is for. Calls keep their
//! origin, so lock owners and repeated changes are known at every level (ADR 0037).

mod callers;
mod connection;
mod file;
mod fs;
mod source;

use std::path::Path;
use std::sync::{Arc, LazyLock};

use dray_backends::backend::{BackendKind, BackendSource, ExportSettings, WrongOption};
use dray_client::Target;
use dray_core::NodeId;
use dray_rpc::server::ForwardingNodes;

use self::callers::CallerPolicy;
use self::source::UpperServers;
use crate::serve::plan::key_file;

/// Exports of other servers.
#[derive(Debug)]
pub struct ForwardKind;

/// How targets begin, as `dray mount` has them.
const SCHEMES: [&str; 2] = ["dray://", "dray+unix://"];

/// Whether the place of an export's files is a target, and no directory.
pub fn is_target(dir: &Path) -> bool {
    SCHEMES.iter().any(|scheme| dir.as_os_str().as_encoded_bytes().starts_with(scheme.as_bytes()))
}

/// How many of the first bytes of `text` are a target: its list of hosts has commas, too. None: it begins
/// with no target.
pub fn target_len(text: &[u8]) -> Option<usize> {
    let scheme = SCHEMES.iter().find(|scheme| text.starts_with(scheme.as_bytes()))?;
    let rest = &text[scheme.len()..];
    // The name of the export comes last, behind the hosts or the path of the socket.
    let name = match scheme.contains("unix") {
        true => rest.windows(SOCKET_END.len()).position(|part| part == SOCKET_END),
        false => rest.iter().position(|byte| *byte == b'/'),
    };
    let name = name.unwrap_or(0);
    let len = rest[name..].iter().position(|byte| *byte == b',').unwrap_or(rest.len() - name);
    Some(scheme.len() + name + len)
}

/// What stands behind the path of a socket in a target.
const SOCKET_END: &[u8] = b"?export=";

/// The nodes by which other servers know this process: it must not be its own client.
pub fn nodes() -> Arc<ForwardingNodes> {
    static NODES: LazyLock<Arc<ForwardingNodes>> = LazyLock::new(Arc::default);
    NODES.clone()
}

impl BackendKind for ForwardKind {
    fn name(&self) -> &'static str {
        "dray"
    }

    fn has_directory(&self) -> bool {
        true // which is a target
    }

    fn options(&self) -> &'static [&'static str] {
        &["auth"]
    }

    fn configure(
        &self,
        settings: &ExportSettings<'_>,
    ) -> Result<Arc<dyn BackendSource>, WrongOption> {
        let wrong = |what: String| WrongOption { what, value: String::new(), known: &[] };
        let text = settings.dir.to_str().ok_or_else(|| wrong("the target is no text".into()))?;
        let target: Target = text.parse().map_err(wrong)?;
        let auth = settings.get("auth").map(str::to_owned);
        auth.as_deref().map_or(Ok(None), key_file).map_err(wrong)?;
        let callers = CallerPolicy { squash: settings.squash, read_only: settings.read_only };
        let node = NodeId::of_server(dray_rt::random_u64());
        nodes().add(node, settings.name);
        let (name, dir) = (settings.name.to_owned(), settings.dir.to_owned());
        let leases = settings.leases;
        Ok(Arc::new(UpperServers { name, node, dir, target, auth, callers, leases }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_ends_where_the_options_begin() {
        for (text, target) in [
            ("dray://a/x", "dray://a/x"),
            ("dray://a,b:7,[::1]/x,ro,squash=none", "dray://a,b:7,[::1]/x"),
            ("dray+unix:///run/a,b?export=x,ro", "dray+unix:///run/a,b?export=x"),
            ("dray://a,ro", "dray://a"),
        ] {
            assert_eq!(target_len(text.as_bytes()), Some(target.len()), "{text}");
        }
        assert_eq!(target_len(b"/srv/dray://a/x"), None);
        assert!(is_target(Path::new("dray://a/x")) && !is_target(Path::new("/dray://a/x")));
    }
}
