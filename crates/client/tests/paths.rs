//! The path-level client over memory, by socket and within the process of its server.

use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_client::{
    Client, ConnectError, ConnectOptions, SessionMemory, Target, connect, session_over,
};
use dray_core::{Context, Errno, FileSystem, Make, Name};
use dray_fabric::{Address, listen_first, local};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{DriverKind, Executor};

fn run<T>(test: impl Future<Output = T>) -> T {
    Executor::new(DriverKind::Epoll).unwrap().block_on(test)
}

/// The tests may run as any user.
fn open_to_all() -> MemoryOptions {
    MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() }
}

fn server_of(fs: Arc<dyn FileSystem>) -> Server {
    let export = Export::new("data", fs, Vec::new());
    Server::new(ServerOptions::default(), vec![export], Arc::new(MemoryJournal::default()))
}

/// Serves `fs` by a Unix socket in `dir`; answers the target.
async fn serve(dir: &std::path::Path, fs: Arc<dyn FileSystem>) -> Target {
    let address = Address::Unix(dir.join("socket"));
    let server = server_of(fs);
    let listener = listen_first(&address).await.unwrap().listener;
    dray_rt::spawn(async move { drop(server.serve_all(listener).await) });
    Target::at(address, "data".into())
}

/// A client within the process of its server.
async fn client_within(fs: Arc<dyn FileSystem>) -> Client {
    let server = server_of(fs);
    let (listener, connector) = local::listen();
    dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
    let (options, memory) = (ConnectOptions::default(), SessionMemory::heap());
    let session = session_over(Arc::new(connector), "data", &options, memory).await;
    Client::over(session.unwrap())
}

/// Files, and two links.
async fn file_system() -> Arc<dyn FileSystem> {
    let fs = MemoryFs::new(open_to_all());
    let (cx, root) = (Context::system(), fs.info().root);
    for (name, target) in [(&b"link"[..], &b"/a/./b/../b"[..]), (b"endless", b"endless")] {
        let name = Name::new(name).unwrap();
        fs.make(&cx, root, name, Make::Symlink { target }).await.unwrap();
    }
    Arc::new(fs)
}

#[test]
fn files_by_path_over_a_socket() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let target = serve(dir.path(), file_system().await).await;
        use_paths(connect(&target.to_string(), &ConnectOptions::default()).await.unwrap()).await;
    });
}

#[test]
fn files_by_path_within_the_process() {
    run(async { use_paths(client_within(file_system().await).await).await });
}

async fn use_paths(client: Client) {
    client.mkdir("/a", 0o755).await.unwrap();
    client.mkdir("a/b/", 0o755).await.unwrap();
    let data: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    client.put("a/b/file", &data).await.unwrap();
    assert_eq!(client.get("link/file").await.unwrap(), data);
    client.put("a/b/file", b"short").await.unwrap();
    assert_eq!(client.stat("../a/b/file").await.unwrap().size, 5);
    client.rename("a/b/file", "a/other").await.unwrap();
    assert_eq!(client.list("a").await.unwrap().len(), 2);
    for through_a_file in ["a/other/", "a/other/.", "a/other/../b"] {
        let error = client.stat(through_a_file).await.unwrap_err();
        assert_eq!(error.errno(), Errno::ENOTDIR, "{through_a_file}");
    }
    client.truncate("a/other", 2).await.unwrap();
    let file = client.open("a/other").await.unwrap();
    let mut bytes = [0; 10];
    assert_eq!(file.read(1, &mut bytes).await.unwrap(), 1);
    file.close().await.unwrap();
    client.unlink("a/other").await.unwrap();
    client.rmdir("a/b").await.unwrap();
    assert_eq!(client.open("a/other").await.err().unwrap().errno(), Errno::ENOENT);
    assert_eq!(client.stat("endless").await.unwrap_err().errno(), Errno::ELOOP);
    assert_eq!(client.mkdir("/", 0o755).await.unwrap_err().errno(), Errno::ENOENT);
    client.goodbye();
}

#[test]
fn nobody_there_is_an_error_that_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::at(Address::Unix(dir.path().join("none")), "x".into());
    run(async {
        let error = Client::connect(&target, &ConnectOptions::default()).await.err().unwrap();
        assert!(matches!(error, ConnectError::Unreachable { .. }));
        assert!(error.to_string().contains("none"), "{error}");
        let error = connect("node1/home", &ConnectOptions::default()).await.err().unwrap();
        assert!(error.to_string().contains("dray://"), "{error}");
    });
}

// proves: P87
#[test]
fn small_files_are_put_in_one_round_trip() {
    run(async {
        let client = client_within(Arc::new(MemoryFs::new(open_to_all()))).await;
        let calls = || {
            let status = client.session().status();
            status.channels.iter().map(|channel| channel.calls).sum::<u64>()
        };
        client.mkdir("d", 0o755).await.unwrap();
        let known = client.dir("d").await.unwrap();
        let before = calls();
        for number in 0..100 {
            known.put(&number.to_string(), &[number; 4096]).await.unwrap();
        }
        assert_eq!(calls() - before, 100, "in a known directory");
        let before = calls();
        client.put("at the root", b"content").await.unwrap();
        assert_eq!(calls() - before, 1, "the root is always known");
        assert_eq!(client.list("d").await.unwrap().len(), 100);
        assert_eq!(client.get("d/77").await.unwrap(), [77; 4096]);
        known.put("77", b"").await.unwrap();
        assert_eq!(client.get("d/77").await.unwrap(), b"", "what was there is replaced");
        assert_eq!(known.put("", b"x").await.unwrap_err().errno(), Errno::ENOENT);
        known.put("large", &vec![1; 3 << 20]).await.unwrap();
        assert_eq!(client.stat("d/large").await.unwrap().size, 3 << 20);
    });
}

// proves: P266
#[test]
fn a_batch_puts_its_files_together_and_says_of_each_what_came_of_it() {
    run(async {
        let client = client_within(Arc::new(MemoryFs::new(open_to_all()))).await;
        let calls = || {
            let status = client.session().status();
            status.channels.iter().map(|channel| channel.calls).sum::<u64>()
        };
        client.mkdir("d", 0o755).await.unwrap();
        client.mkdir("d/17", 0o755).await.unwrap();
        let known = client.dir("d").await.unwrap();
        let names: Vec<String> = (0..200).map(|number| number.to_string()).collect();
        let large = vec![9; 300 << 10]; // more of these than may be under way
        let content = |index: usize| match index % 5 {
            0 => &large[..],
            _ => names[index].as_bytes(),
        };
        let mut files: Vec<(&str, &[u8])> =
            (0..200).map(|index| (&*names[index], content(index))).collect();
        files[23].0 = "no/name";
        let before = calls();
        let results = known.put_all(&files).await;
        assert_eq!((calls() - before, results.len()), (199, 200));
        for (index, result) in results.iter().enumerate() {
            let errno = result.as_ref().err().map(|error| error.errno());
            match index {
                17 => assert_eq!(errno, Some(Errno::EISDIR)),
                23 => assert_eq!(errno, Some(Errno::EINVAL)),
                _ => {
                    assert_eq!(errno, None, "{index}");
                    let path = format!("d/{index}");
                    assert_eq!(client.get(&path).await.unwrap(), content(index));
                }
            }
        }
        assert!(known.put_all(&[]).await.is_empty());
    });
}
