//! A projection with failover, of which one server is dead: mounting it, and going on with the mount.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_client::{ClientConnection, ClientMemory, ConnectOptions, SessionMemory, Target};
use dray_core::{Context, FileSystem, Identity, Make, Name, Pid, RequestId};
use dray_fabric::{Address, listen_first};
use dray_layers::placement::{Definition, parse_definitions};
use dray_rpc::server::{Export, ExportDefinition, MemoryJournal, Server, ServerOptions};
use dray_rt::{DriverKind, Executor};

const SERVERS: usize = 3;
const DEAD: usize = 0;
const WAIT: Duration = Duration::from_secs(5);

fn definition(dir: &Path) -> Definition {
    let servers: Vec<String> =
        (0..SERVERS).map(|number| format!("'unix://{}/{number}'", dir.display())).collect();
    let servers = servers.join(", ");
    let text = format!(
        "[projection.x]\nlayout = 'cluster'\nservers = [{servers}]\npath = '/'\nfailover = true"
    );
    parse_definitions(&text).unwrap().remove(0)
}

/// Serves the definition, and all slices that the dead server has left to this one.
async fn serve(dir: &Path, number: usize, fs: &Arc<dyn FileSystem>) {
    let definition = definition(dir);
    let text = definition.canonical();
    let of_clients = ExportDefinition { fingerprint: definition.fingerprint(), text };
    let of_clients = Arc::new(of_clients);
    let others = (0..SERVERS).filter(|other| *other != number);
    let mut names: Vec<String> = others.map(|other| format!("x/{number}.{other}")).collect();
    names.extend(["x".to_owned(), format!("x/{DEAD}.{number}")]);
    let exports = names.into_iter().map(|name| {
        let mut export = Export::new(&name, fs.clone(), Vec::new());
        export.definition = Some(of_clients.clone());
        export
    });
    let journal = Arc::new(MemoryJournal::default());
    let server = Server::new(ServerOptions::default(), exports.collect(), journal);
    let address = Address::Unix(dir.join(number.to_string()));
    let listener = listen_first(&address).await.unwrap().listener;
    dray_rt::spawn(async move { drop(server.serve_all(listener).await) });
}

fn begun(connection: &ClientConnection) -> usize {
    connection.sessions().iter().filter(|session| session.has_begun()).count()
}

/// Makes some directories, so that some are at each slice.
async fn use_all(connection: &ClientConnection, prefix: &str) {
    let stack = connection.stack();
    let root = Identity {
        uid: dray_core::Uid(0),
        gid: dray_core::Gid(0),
        groups: [].into(),
        job: "".into(),
    };
    let cx = |request| {
        Context::new(stack.session.node(), RequestId(request), Arc::new(root.clone()), Pid(1))
    };
    let mut dir = stack.fs.info().root;
    for number in 0..24 {
        let name = format!("{prefix}{number}");
        let name = Name::new(name.as_bytes()).unwrap();
        let what = Make::Directory { mode: 0o755 };
        dir = stack.fs.make(&cx(number + 1), dir, name, what).await.unwrap().id;
    }
}

#[test]
fn a_mount_comes_up_and_goes_on_while_a_server_is_dead() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let options = MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
        let fs: Arc<dyn FileSystem> = Arc::new(MemoryFs::new(options));
        for number in (0..SERVERS).filter(|number| *number != DEAD) {
            serve(dir.path(), number, &fs).await;
        }
        let memory = SessionMemory::create_memfd().unwrap();
        let memory = ClientMemory::Held(memory.fd().unwrap().try_clone_to_owned().unwrap());
        let target = Target::at(Address::Unix(dir.path().join("2")), "x".into());
        let options = ConnectOptions::default();
        let first = ClientConnection::connect(&target, &options, &memory, WAIT).await.unwrap();
        assert_eq!((first.sessions().len(), begun(&first)), (6, 1));
        use_all(&first, "a").await;
        let sessions = begun(&first);
        assert!(sessions > 3, "only {sessions}");
        let statuses = first.sessions().iter().map(|session| session.status());
        let dead = format!("unix://{}/{DEAD}", dir.path().display());
        assert!(statuses.clone().all(|status| status.target != dead || status.channels.is_empty()));
        let numbers: Vec<u64> = statuses.map(|status| status.session).collect();
        drop(first); // as the death of its process

        let again =
            ClientConnection::take_over(&target, &options, &memory, WAIT, false).await.unwrap();
        let again = again.unwrap();
        assert_eq!(begun(&again), sessions);
        use_all(&again, "b").await;
        let same = again.sessions().iter().zip(numbers).filter(|(_, number)| *number != 0);
        assert!(same.clone().all(|(session, number)| session.status().session == number));
        assert_eq!(same.count(), sessions);
    });
}
