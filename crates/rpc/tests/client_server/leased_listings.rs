//! Listings, extended attributes and new files under leases: what costs a round trip, and what none.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::leased_site::{LeasedSite, YES};
use crate::common::simulate;
use dray_core::{
    Buf, Context, CreateHow, Errno, FileId, FileSystem, Make, Name, OpenHow, RemoveKind, RenameHow,
    SetAttr, Ttl, Write, XattrSet,
};
use dray_rpc::client::RemoteFs;
use dray_rt::sleep;

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
/// As open(2) with `O_CREAT` and `O_TRUNC` asks for a new file.
const CUT: OpenHow = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
const DIRECTORY: OpenHow = OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY);
const PAGE_BYTES: usize = 128 << 10;
/// Longer than what was fought over rests.
const REST: Duration = Duration::from_secs(20);

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn calls(fs: &RemoteFs) -> u64 {
    fs.session().status().channels.iter().map(|channel| channel.calls).sum()
}

/// What `run` gives, and the round trips that it took.
async fn counted<T>(fs: &RemoteFs, run: impl Future<Output = T>) -> (T, u64) {
    let before = calls(fs);
    let got = run.await;
    (got, calls(fs) - before)
}

/// All names, as a program lists them with `ls -l`: the directory and each entry with attributes. Also the
/// bytes of names and records that were read.
async fn list(fs: &RemoteFs, dir: FileId) -> (BTreeSet<String>, usize) {
    let cx = Context::system();
    fs.getattr(&cx, dir).await.unwrap();
    let open = fs.open(&cx, dir, DIRECTORY).await.unwrap();
    let (mut names, mut cookie, mut bytes) = (BTreeSet::new(), 0, 0);
    loop {
        let page = open.readdir(&cx, cookie, PAGE_BYTES, true).await.unwrap();
        for (name, entry) in page.iter() {
            bytes += 24 + name.len() + 128;
            cookie = entry.cookie;
            names.insert(String::from_utf8(name.to_vec()).unwrap());
            if entry.attr.is_none() {
                fs.getattr(&cx, entry.id).await.unwrap();
            }
        }
        if page.end || page.is_empty() {
            break;
        }
    }
    open.close(&cx).await.unwrap();
    (names, bytes)
}

async fn make_files(fs: &RemoteFs, dir: FileId, names: impl Iterator<Item = String>) {
    for text in names {
        let cx = Context::system();
        let (_, file) = fs.create(&cx, dir, name(&text), NEW).await.unwrap();
        file.close(&cx).await.unwrap();
    }
}

// proves: P228
#[test]
fn a_listing_is_read_once_and_a_change_of_a_name_is_seen_at_once() {
    simulate(41, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let (reader, writer) = (site.client("reader", YES).await, site.client("writer", YES).await);
        make_files(&writer, root, (0..100).map(|number| format!("file{number}"))).await;
        let mut expected = list(&reader, root).await.0;
        assert_eq!(expected.len(), 100);
        list(&reader, root).await; // the time of the last access is asked for once more
        let (from, to) = ((root, name("file7")), (root, name("new")));
        for change in ["nothing", "create", "remove", "rename"] {
            match change {
                "create" => {
                    make_files(&writer, root, ["made".to_owned()].into_iter()).await;
                    expected.insert("made".to_owned());
                }
                "remove" => {
                    writer.remove(&cx, root, name("made"), RemoveKind::File).await.unwrap();
                    expected.remove("made");
                }
                "rename" => {
                    writer.rename(&cx, from, to, RenameHow::Replace).await.unwrap();
                    expected.remove("file7");
                    expected.insert("new".to_owned());
                }
                _ => {}
            }
            assert_eq!(list(&reader, root).await.0, expected, "after {change}");
            sleep(REST).await;
            list(&reader, root).await;
            list(&reader, root).await;
            let ((again, _), trips) = counted(&reader, list(&reader, root)).await;
            assert_eq!((again, trips), (expected.clone(), 0), "{change}");
        }
        let status = reader.session().status().leases.unwrap();
        assert!(status.listings == 1 && (2000..20_000).contains(&status.listing_bytes));
    });
}

/// `cold_round_trips_per_64k`: the directory is opened and read, and nothing is asked of single files.
// proves: P228
#[test]
fn a_listing_costs_at_most_one_round_trip_for_64_kib_when_nothing_is_known() {
    simulate(42, async {
        let site = LeasedSite::new();
        let (writer, cold) = (site.client("writer", YES).await, site.client("cold", YES).await);
        make_files(&writer, site.root, (0..3000).map(|number| format!("file{number:020}"))).await;
        let ((names, bytes), trips) = counted(&cold, list(&cold, site.root)).await;
        assert_eq!(names.len(), 3000);
        let per_64k = trips as f64 / (bytes as f64 / 65_536.0);
        println!("cold_round_trips_per_64k {per_64k:.2}: {trips} for {bytes} bytes");
        assert!(per_64k <= 1.0, "{trips} round trips for {bytes} bytes");
        assert!(counted(&cold, list(&cold, site.root)).await.1 <= 1);
        assert_eq!(counted(&cold, list(&cold, site.root)).await.1, 0);
    });
}

// proves: P229
#[test]
fn extended_attributes_are_asked_for_once_also_those_that_are_absent() {
    simulate(43, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let (reader, writer) = (site.client("reader", YES).await, site.client("writer", YES).await);
        let (entry, file) = writer.create(&cx, root, name("f"), NEW).await.unwrap();
        let id = entry.id;
        let names = ["system.posix_acl_access", "security.capability", "user.a"];
        let ask = || async {
            let mut got = Vec::new();
            reader.getattr(&cx, id).await.unwrap();
            for text in names {
                let value = reader.getxattr(&cx, id, text.as_bytes()).await;
                got.push(value.map_err(|error| error.errno()));
            }
            (got, reader.listxattr(&cx, id).await.unwrap())
        };
        let absent = Err(Errno::ENODATA);
        let set = |value: &'static [u8]| writer.setxattr(&cx, id, b"user.a", value, XattrSet::Any);
        for (change, value) in [
            ("nothing", absent.clone()),
            ("set", Ok(vec![1])),
            ("mode", Ok(vec![1])),
            ("remove", absent),
        ] {
            match change {
                "set" => set(&[1]).await.unwrap(),
                "mode" => {
                    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                    writer.setattr(&cx, id, mode).await.unwrap();
                }
                "remove" => writer.removexattr(&cx, id, b"user.a").await.unwrap(),
                _ => {}
            }
            let first = ask().await;
            assert_eq!(first.0[2], value, "after {change}");
            sleep(REST).await;
            assert_eq!(ask().await, first);
            let (again, trips) = counted(&reader, ask()).await;
            assert_eq!((again, trips), (first, 0), "{change}");
        }
        // What the client changes itself.
        reader.setxattr(&cx, id, b"user.a", b"own", XattrSet::Any).await.unwrap();
        assert_eq!(ask().await.0[2], Ok(b"own".to_vec()));
        // What is too large is asked for each time.
        set(&[7; 5000]).await.unwrap();
        sleep(REST).await;
        ask().await;
        assert_eq!(counted(&reader, ask()).await.1, 1);
        file.close(&cx).await.unwrap();
    });
}

/// What `ls -l` asks of each file comes with the listing. Most files have none of it.
// proves: P265
#[test]
fn a_listing_says_which_extended_attributes_its_files_do_not_have() {
    simulate(47, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let (writer, cold) = (site.client("writer", YES).await, site.client("cold", YES).await);
        make_files(&writer, root, (0..300).map(|number| format!("file{number}"))).await;
        let (acl, capability) = ("system.posix_acl_access", "security.capability");
        let mut has = Vec::new();
        for (text, attribute) in [("file7", "user.a"), ("file8", capability), ("file9", acl)] {
            let id = writer.lookup(&cx, root, name(text)).await.unwrap().id;
            let set = writer.setxattr(&cx, id, attribute.as_bytes(), b"value", XattrSet::Any);
            set.await.unwrap();
            has.push((id, attribute));
        }
        sleep(REST).await;
        let ((), listed) = counted(&cold, async { drop(list(&cold, root).await) }).await;
        let ids: Vec<FileId> = {
            let open = cold.open(&cx, root, DIRECTORY).await.unwrap();
            let page = open.readdir(&cx, 0, PAGE_BYTES, true).await.unwrap();
            open.close(&cx).await.unwrap();
            page.iter().map(|(_, entry)| entry.id).collect()
        };
        let ask = |id: FileId| {
            let (cold, cx, has) = (&cold, &cx, &has);
            async move {
                for attribute in [acl, capability] {
                    let found = cold.getxattr(cx, id, attribute.as_bytes()).await;
                    assert_eq!(found.is_ok(), has.contains(&(id, attribute)), "{id:?}");
                }
                let list = cold.listxattr(cx, id).await.unwrap();
                assert_eq!(list.is_empty(), !has.iter().any(|(known, _)| *known == id));
            }
        };
        let ((), trips) = counted(&cold, async {
            for id in &ids {
                ask(*id).await;
            }
        })
        .await;
        println!("long_listing_round_trips {}: {listed} for the listing", listed + trips);
        assert_eq!((ids.len(), trips), (300, 5), "two attributes, and three lists");
        // Others set one.
        let (id, attribute) = (ids[100], acl.as_bytes());
        writer.setxattr(&cx, id, attribute, b"new", XattrSet::Any).await.unwrap();
        assert_eq!(cold.getxattr(&cx, id, attribute).await.unwrap(), b"new");
        assert_eq!(cold.listxattr(&cx, id).await.unwrap(), b"system.posix_acl_access\0");
    });
}

/// `create_round_trips_leased`: the creation and the write. The lookup before the creation is answered by the
/// listing, the closing needs no answer, and what was made is known.
// proves: P230
#[test]
fn a_small_file_costs_its_creation_and_its_write() {
    simulate(44, async {
        let site = LeasedSite::new();
        let (root, cx, fs) = (site.root, Context::system(), site.client("one", YES).await);
        let made = fs.make(&cx, root, name("dir"), Make::Directory { mode: 0o755 }).await.unwrap();
        let dir = made.id;
        assert!(made.attr.validity.attributes > Some(Ttl::ZERO));
        let ((), trips) = counted(&fs, async {
            for number in 0..50 {
                let text = format!("f{number}");
                let absent = fs.lookup(&cx, dir, name(&text)).await.unwrap_err();
                assert_eq!(absent.errno(), Errno::ENOENT);
                let how = CreateHow { open: CUT, mode: 0o644, exclusive: number % 2 == 0 };
                let (entry, file) = fs.create(&cx, dir, name(&text), how).await.unwrap();
                assert_eq!(fs.lookup(&cx, dir, name(&text)).await.unwrap().id, entry.id);
                assert_eq!(fs.getattr(&cx, entry.id).await.unwrap().size, 0);
                file.write(&cx, Write::at(0), Buf::from(&b"content"[..])).await.unwrap();
                file.close(&cx).await.unwrap();
            }
        })
        .await;
        println!("create_round_trips_leased {}", trips as f64 / 50.0);
        assert!(trips <= 2 * 50, "{trips}");
        assert_eq!(list(&fs, dir).await.0.len(), 50);
        // Other kinds of files are known, too.
        let ((), trips) = counted(&fs, async {
            let link = Make::Symlink { target: b"f1" };
            let link = fs.make(&cx, dir, name("link"), link).await.unwrap();
            assert_eq!(fs.lookup(&cx, dir, name("link")).await.unwrap().id, link.id);
            let f1 = fs.lookup(&cx, dir, name("f1")).await.unwrap().id;
            let again = fs.link(&cx, f1, dir, name("again")).await.unwrap();
            assert_eq!(again.attr.nlink, 2);
            assert_eq!(fs.lookup(&cx, dir, name("again")).await.unwrap().attr.nlink, 2);
            assert_eq!(fs.lookup(&cx, dir, name("f1")).await.unwrap().attr.nlink, 2);
        })
        .await;
        assert_eq!(trips, 2);
    });
}

/// Another client fills a directory that this one has made.
// proves: P230
#[test]
fn names_that_others_make_in_a_new_directory_are_found() {
    simulate(45, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let (one, other) = (site.client("one", YES).await, site.client("other", YES).await);
        for round in 0..20 {
            let text = format!("dir{round}");
            let made = Make::Directory { mode: 0o755 };
            let dir = one.make(&cx, root, name(&text), made).await.unwrap().id;
            let absent = one.lookup(&cx, dir, name("f")).await.unwrap_err();
            assert_eq!(absent.errno(), Errno::ENOENT);
            let there = other.lookup(&cx, root, name(&text)).await.unwrap().id;
            make_files(&other, there, ["f".to_owned()].into_iter()).await;
            one.lookup(&cx, dir, name("f")).await.unwrap();
            assert_eq!(list(&one, dir).await.0.len(), 1);
            other.remove(&cx, there, name("f"), RemoveKind::File).await.unwrap();
            assert!(one.lookup(&cx, dir, name("f")).await.is_err());
        }
    });
}

/// Programs that copy a tree ask several times whether a file is there. The answer to the first creation leases the
/// names of the directory.
// proves: P352
#[test]
fn absent_names_of_a_new_directory_are_leased_with_the_first_name_that_is_made() {
    simulate(47, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let (one, other) = (site.client("one", YES).await, site.client("other", YES).await);
        let made = Make::Directory { mode: 0o755 };
        let dir = one.make(&cx, root, name("dir"), made).await.unwrap().id;
        // Whether a name may be believed to be absent. To know that it is costs nothing.
        let absent = async |text: &str| {
            let (found, trips) = counted(&one, one.lookup(&cx, dir, name(text))).await;
            let error = found.unwrap_err();
            assert_eq!((error.errno(), trips), (Errno::ENOENT, 0));
            error.absence().is_some_and(|ttl| ttl > Ttl::ZERO)
        };
        assert!(!absent("a").await && !absent("a").await, "others could make it unnoticed");
        make_files(&one, dir, ["b".to_owned()].into_iter()).await;
        assert!(absent("a").await && absent("c").await);
        let recalled = || one.session().status().leases.unwrap().recalled;
        let before = recalled();
        let there = other.lookup(&cx, root, name("dir")).await.unwrap().id;
        make_files(&other, there, ["c".to_owned()].into_iter()).await;
        assert_eq!(recalled() - before, 2, "the attributes of the directory, and the name");
        one.lookup(&cx, dir, name("c")).await.unwrap();
        assert_eq!(list(&one, dir).await.0, ["b", "c"].map(str::to_owned).into());
    });
}

#[test]
fn a_directory_that_was_removed_while_it_was_open_is_empty() {
    simulate(46, async {
        let site = LeasedSite::new();
        let (root, cx) = (site.root, Context::system());
        let (one, other) = (site.client("one", YES).await, site.client("other", YES).await);
        let made = Make::Directory { mode: 0o755 };
        let dir = one.make(&cx, root, name("dir"), made).await.unwrap().id;
        let (open, trips) = counted(&one, one.open(&cx, dir, DIRECTORY)).await;
        let open = open.unwrap();
        assert_eq!(trips, 0, "its listing is known: it is empty");
        other.remove(&cx, root, name("dir"), RemoveKind::Directory).await.unwrap();
        let page = open.readdir(&cx, 0, PAGE_BYTES, true).await.unwrap();
        assert!(page.end && page.is_empty());
        open.close(&cx).await.unwrap();
    });
}
