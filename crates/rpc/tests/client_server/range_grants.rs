//! Changes wait for each other, and never in a circle.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_core::{
    Buf, Context, CreateHow, Errno, FileSystem, Make, Name, Op, OpenHow, RenameHow, Result,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Scope, sleep, spawn_join, timeout};

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// The name of a directory is given for a file to cut, while a file is moved between that directory
/// and the one above. Both changes are about both directories, in their own order.
// proves: P86
#[test]
fn cutting_a_directory_does_not_wait_in_a_circle_with_a_rename() {
    simulate(1, async {
        let network = Network::new();
        let delay = Duration::from_millis(10);
        let slow = Fault { op: Some(Op::Lookup), when: When::Always, delay, error: None };
        let fs = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
        let exports = vec![Export::new("data", Arc::new(fs), Vec::new())];
        let journal = Arc::new(MemoryJournal::default());
        let (server, server_process) =
            (Server::new(ServerOptions::default(), exports, journal), Scope::new());
        serve_simulated(&network, "s", &server, &server_process);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let directory = Make::Directory { mode: 0o755 };
        // The inner one is the older, and so comes first where both are waited for.
        let inner = fs.make(&cx, root, name("inner"), directory).await.unwrap().id;
        let outer = fs.make(&cx, root, name("outer"), directory).await.unwrap().id;
        assert!(inner.ino < outer.ino);
        let (from, to) = ((root, name("inner")), (outer, name("inner")));
        fs.rename(&cx, from, to, RenameHow::Replace).await.unwrap();
        let open = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        let cut = CreateHow { open, mode: 0o644, exclusive: false };
        for put in [false, true] {
            let cutting = spawn_join({
                let fs = fs.clone();
                async move {
                    let (cx, what) = (Context::system(), name("inner"));
                    match put {
                        true => fs.put(&cx, outer, what, 0o644, Buf::from(&b"x"[..])).await,
                        false => fs.create(&cx, outer, what, cut).await.map(|_| ()),
                    }
                }
            });
            sleep(Duration::from_millis(5)).await;
            let (from, to) = ((inner, name("none")), (outer, name("none")));
            let moving = fs.rename(&cx, from, to, RenameHow::Replace);
            let moved: Result<()> = timeout(Duration::from_secs(5), moving).await.unwrap();
            assert_eq!(moved.unwrap_err().errno(), Errno::ENOENT);
            let cut = timeout(Duration::from_secs(5), cutting).await.unwrap();
            assert_eq!(cut.unwrap().unwrap_err().errno(), Errno::EISDIR);
        }
    });
}
