//! Answers to changes that have the attributes of what was changed: the client does not ask for them.

use crate::common::leased_site::{LeasedSite, YES};
use crate::common::lessee::Lessee;
use crate::common::simulate;
use dray_core::{
    Attr, Buf, Context, CreateHow, FileId, FileSystem, Make, Name, OpenHow, RemoveKind, RenameHow,
    SetAttr, TimeSet, Timestamp, Validity, Write,
};
use dray_rpc::client::RemoteFs;
use dray_rpc::wire::{Call, FEATURE_CHANGED_FILES, FEATURE_LEASES};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
const DIRECTORY: Make<'_> = Make::Directory { mode: 0o755 };

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn calls(fs: &RemoteFs) -> u64 {
    fs.session().status().channels.iter().map(|channel| channel.calls).sum()
}

/// The attributes of a file, without what is said of their validity, and the round trips for them.
async fn attributes(fs: &RemoteFs, id: FileId) -> (Attr, u64) {
    let before = calls(fs);
    let attr = fs.getattr(&Context::system(), id).await.unwrap();
    (Attr { validity: Validity::UNSAID, ..attr }, calls(fs) - before)
}

/// A client of its own asks the server each time.
async fn are_known(fs: &RemoteFs, other: &RemoteFs, ids: &[FileId], what: &str) {
    for id in ids {
        let (known, trips) = attributes(fs, *id).await;
        assert_eq!((known, trips), (attributes(other, *id).await.0, 0), "{what}");
    }
}

// proves: P263
#[test]
fn the_attributes_of_a_changed_directory_come_with_the_answer() {
    simulate(61, async {
        let site = LeasedSite::new();
        let (root, cx, fs) = (site.root, Context::system(), site.client("one", YES).await);
        let other = site.client("other", Default::default()).await;
        let mut dirs = Vec::new();
        for text in ["dir", "second"] {
            dirs.push(fs.make(&cx, root, name(text), DIRECTORY).await.unwrap().id);
        }
        let (dir, second) = (dirs[0], dirs[1]);
        are_known(&fs, &other, &[root], "made").await;
        let (entry, file) = fs.create(&cx, dir, name("f"), NEW).await.unwrap();
        are_known(&fs, &other, &[dir], "create").await;
        file.close(&cx).await.unwrap();
        let sub = fs.make(&cx, dir, name("sub"), DIRECTORY).await.unwrap();
        are_known(&fs, &other, &[dir], "mkdir").await;
        assert_eq!(attributes(&fs, dir).await.0.nlink, 3);
        fs.make(&cx, dir, name("link"), Make::Symlink { target: b"f" }).await.unwrap();
        are_known(&fs, &other, &[dir], "symlink").await;
        fs.link(&cx, entry.id, second, name("again")).await.unwrap();
        are_known(&fs, &other, &[second, entry.id], "link").await;
        let (from, to) = ((dir, name("sub")), (second, name("moved")));
        fs.rename(&cx, from, to, RenameHow::Replace).await.unwrap();
        are_known(&fs, &other, &[dir, second], "rename").await;
        let (from, to) = ((dir, name("f")), (dir, name("g")));
        fs.rename(&cx, from, to, RenameHow::Replace).await.unwrap();
        are_known(&fs, &other, &[dir], "rename here").await;
        fs.lookup(&cx, second, name("moved")).await.unwrap();
        fs.remove(&cx, second, name("moved"), RemoveKind::Directory).await.unwrap();
        are_known(&fs, &other, &[second], "rmdir").await;
        fs.put(&cx, dir, name("put"), 0o644, Buf::from(&b"content"[..])).await.unwrap();
        are_known(&fs, &other, &[dir], "put").await;
        // Another client changes the directory: what this one knew of it is gone.
        other.remove(&cx, dir, name("put"), RemoveKind::File).await.unwrap();
        let (seen, trips) = attributes(&fs, dir).await;
        assert_eq!((seen, trips), (attributes(&other, dir).await.0, 1));
        assert!(fs.getattr(&cx, sub.id).await.is_err());
    });
}

// proves: P264
#[test]
fn attributes_come_with_the_first_write_and_with_each_change_of_them() {
    simulate(62, async {
        let site = LeasedSite::new();
        let (root, cx, fs) = (site.root, Context::system(), site.client("one", YES).await);
        let other = site.client("other", Default::default()).await;
        let (entry, file) = fs.create(&cx, root, name("f"), NEW).await.unwrap();
        let id = entry.id;
        let write = |at| file.write(&cx, Write::at(at), Buf::from(&b"content"[..]));
        write(0).await.unwrap();
        are_known(&fs, &other, &[id], "first write").await;
        assert_eq!(attributes(&fs, id).await.0.size, 7);
        write(7).await.unwrap();
        let (attr, trips) = attributes(&fs, id).await;
        assert_eq!((attr.size, trips), (14, 1), "a file that is written many times");
        let time = TimeSet::At(Timestamp { sec: 7, nsec: 0 });
        for set in [
            SetAttr { mode: Some(0o600), ..SetAttr::default() },
            SetAttr { mtime: Some(time), ..SetAttr::default() },
            SetAttr { size: Some(3), ..SetAttr::default() },
        ] {
            fs.setattr(&cx, id, set).await.unwrap();
            are_known(&fs, &other, &[id], "by its id").await;
            file.setattr(&cx, set).await.unwrap();
            are_known(&fs, &other, &[id], "by the open file").await;
        }
        let by_other = SetAttr { mode: Some(0o640), ..SetAttr::default() };
        other.setattr(&cx, id, by_other).await.unwrap();
        let (attr, trips) = attributes(&fs, id).await;
        assert_eq!((attr.mode & 0o777, trips), (0o640, 1));
        file.close(&cx).await.unwrap();
    });
}

/// Two changes of one client that are under way together. Which of the answers is the later one the client
/// does not know.
// proves: P263
#[test]
fn of_two_changes_together_none_leaves_an_older_state() {
    simulate(63, async {
        let site = LeasedSite::new();
        let (root, fs) = (site.root, site.client("one", YES).await);
        let other = site.client("other", Default::default()).await;
        for round in 0..200 {
            let make = |who| {
                let fs = fs.clone();
                dray_rt::spawn_join(async move {
                    let text = format!("dir{who}.{round}");
                    fs.make(&Context::system(), root, name(&text), DIRECTORY).await.unwrap();
                })
            };
            let both = [make(0), make(1)];
            for one in both {
                one.await.unwrap();
            }
            let seen = attributes(&fs, root).await.0;
            assert_eq!(seen, attributes(&other, root).await.0, "{round}");
        }
    });
}

/// A client of the version before does not know them, and an answer that is given again says nothing of
/// what may have changed since.
// proves: P263
#[test]
fn who_does_not_know_changed_files_gets_none_and_an_answer_that_comes_again_has_none() {
    simulate(64, async {
        let site = LeasedSite::new();
        let mut before = Lessee::connect(&site.network, None).await;
        let make = |name| {
            let (kind, mode, rdev, target) = (0, 0o755, 0, &[][..]);
            Call::Make { dir: site.root, name, kind, mode, rdev, target }
        };
        let (head, _) = before.ask(&make(b"first")).await;
        assert!(head.error().is_none() && head.changed_files.is_empty());
        before.say_goodbye();
        let features = FEATURE_LEASES | FEATURE_CHANGED_FILES;
        let mut knows = Lessee::connect_with(&site.network, None, features).await;
        let (head, _) = knows.ask(&make(b"second")).await;
        assert!(head.error().is_none());
        let [(id, attr)] = head.changed_files[..] else { panic!("{:?}", head.changed_files) };
        assert_eq!((id, attr.nlink), (site.root, 4));
        assert!(attr.validity.attributes.is_some());
        let (head, _) = knows.ask_again(&make(b"second")).await;
        assert!(head.error().is_none() && head.changed_files.is_empty());
    });
}
