//! Metrics count what clients ask for, and not what the server looks at for itself meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_core::{
    Buf, Context, CreateHow, FileSystem, Make, Name, Op, OpenHow, RemoveKind, RenameHow, Write,
    XattrSet,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::metrics::Metrics;
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::Scope;

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A server, a client of it, and what the one counts.
struct Site {
    fs: RemoteFs,
    metrics: Arc<Metrics>,
    before: BTreeMap<&'static str, (u64, u64)>,
    _server_process: Scope,
}

impl Site {
    async fn new() -> Site {
        let (network, server_process, metrics) =
            (Network::new(), Scope::new(), Arc::new(Metrics::new()));
        let below = Observed::new(Arc::new(memory()), metrics.clone());
        let export = Export::new("data", Arc::new(below), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        server.restore(StateLoss::Nothing).await;
        serve_simulated(&network, "s", &server, &server_process);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        Site { fs, metrics, before: BTreeMap::new(), _server_process: server_process }
    }

    /// Since it was asked last this was counted: which operations, and how many failed.
    fn counted(&mut self, expected: &[(Op, u64)]) {
        let all = self.metrics.snapshot().ops;
        let now: BTreeMap<_, _> =
            all.iter().map(|one| (one.op.name(), (one.count, one.errors.values().sum()))).collect();
        let since = now.iter().filter_map(|(op, (count, errors))| {
            let before = self.before.get(op).copied().unwrap_or_default();
            (*count != before.0).then_some((*op, count - before.0, errors - before.1))
        });
        let mut expected: Vec<_> =
            expected.iter().map(|(op, errors)| (op.name(), 1, *errors)).collect();
        expected.sort();
        assert_eq!(since.collect::<Vec<_>>(), expected);
        self.before = now;
    }
}

#[test]
fn a_change_of_a_name_counts_once_and_nothing_else_does() {
    simulate(1, async {
        let mut site = Site::new().await;
        let (cx, fs, root) = (Context::system(), site.fs.clone(), site.fs.info().root);
        // As a mount opens that keeps what it once learned, and asks for more.
        let open = OpenHow { with_attr: true, ..OpenHow::READ_WRITE };
        let new = CreateHow { open, mode: 0o644, exclusive: false };
        let (entry, file) = fs.create(&cx, root, name("f"), new).await.unwrap();
        site.counted(&[(Op::Create, 0)]);
        fs.create(&cx, root, name("f"), CreateHow { exclusive: true, ..new }).await.err().unwrap();
        site.counted(&[(Op::Create, 1)]);
        let cut = OpenHow { flags: libc::O_RDWR | libc::O_TRUNC, ..open };
        let mut opened = Vec::new(); // until the end: a close would be counted
        for how in [open, cut] {
            opened.push(fs.open_named(&cx, (root, name("f")), entry.id, how).await.unwrap());
            site.counted(&[(Op::Open, 0)]);
        }
        fs.make(&cx, root, name("d"), Make::Directory { mode: 0o755 }).await.unwrap();
        site.counted(&[(Op::Make, 0)]);
        fs.link(&cx, entry.id, root, name("g")).await.unwrap();
        site.counted(&[(Op::Link, 0)]);
        let (from, to) = ((root, name("f")), (root, name("h")));
        fs.rename(&cx, from, to, RenameHow::Replace).await.unwrap();
        site.counted(&[(Op::Rename, 0)]);
        fs.remove(&cx, root, name("g"), RemoveKind::File).await.unwrap();
        site.counted(&[(Op::Remove, 0)]);
        fs.remove(&cx, root, name("g"), RemoveKind::File).await.unwrap_err();
        site.counted(&[(Op::Remove, 1)]);
        fs.setxattr(&cx, entry.id, b"user.a", b"x", XattrSet::Any).await.unwrap();
        site.counted(&[(Op::Setxattr, 0)]);
        let append = Write { append: true, ..Write::at(0) };
        file.write(&cx, append, Buf::from(&b"data"[..])).await.unwrap();
        site.counted(&[(Op::Write, 0)]);
        file.copy_range(&cx, 0, &*file, 10, 4).await.unwrap();
        site.counted(&[(Op::CopyRange, 0)]);
        fs.lookup(&cx, root, name("none")).await.unwrap_err();
        site.counted(&[(Op::Lookup, 1)]);
        fs.put(&cx, root, name("put"), 0o644, Buf::from(&b"data"[..])).await.unwrap();
        // The three calls that it stands for.
        site.counted(&[(Op::Create, 0), (Op::Write, 0), (Op::Flush, 0), (Op::Close, 0)]);
    });
}
