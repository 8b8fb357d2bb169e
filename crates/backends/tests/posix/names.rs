//! Names, links, renames, listings.

use crate::rig::*;
use dray_core::*;

// proves: P36
#[test]
fn names_of_any_bytes_and_the_longest() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let long = [b'x'; 255];
        for bytes in [&b"\xff\xfe\x01"[..], b"...", b" ", &long] {
            let n = Name::new(bytes).unwrap();
            let (entry, _file) = kit.fs.create(cx, kit.root, n, create_how(0o644)).await.unwrap();
            assert_eq!(kit.fs.lookup(cx, kit.root, n).await.unwrap().id, entry.id);
        }
        let dir = kit.fs.open(cx, kit.root, OpenHow::DIRECTORY).await.unwrap();
        let page = dir.readdir(cx, 0, 1 << 16, true).await.unwrap();
        assert!(page.end);
        assert!(page.iter().any(|(n, entry)| n == long && entry.attr.is_some()));
    });
}

/// What is looked up in a directory from which something was just removed is expected to be
/// removed, too. No descriptor is kept for it. Nobody may see that.
#[test]
fn lookups_behind_a_removal_answer_what_others_do() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let dir = kit.common("d").await;
        let file = kit.file(cx, dir, "file", 0o644, b"data").await;
        let sub = kit.mkdir(cx, dir, "sub", 0o755).await.unwrap().id;
        let symlink = Make::Symlink { target: b"nowhere" };
        let link = kit.fs.make(cx, dir, name("link"), symlink).await.unwrap().id;
        for (n, id) in [("file", file), ("sub", sub), ("link", link)] {
            let usual = kit.lookup(cx, dir, n).await.unwrap();
            kit.file(cx, dir, "victim", 0o644, b"").await;
            kit.unlink(cx, dir, "victim").await.unwrap();
            let behind = kit.lookup(cx, dir, n).await.unwrap();
            assert_eq!((behind, behind.id), (usual, id));
            assert_eq!(kit.fs.getattr(cx, id).await.unwrap(), usual.attr);
            kit.file(cx, dir, "victim", 0o644, b"").await;
            kit.unlink(cx, dir, "victim").await.unwrap();
            assert_eq!(errno(kit.lookup(cx, dir, "victim").await), Errno::ENOENT);
        }
        let opened = kit.fs.open(cx, file, OpenHow::READ).await.unwrap();
        assert_eq!(get(cx, &*opened, 0, 10).await.unwrap(), b"data");
        let other_user = user(1001, 1001, &[]);
        kit.fs.setattr(cx, dir, SetAttr { mode: Some(0o700), ..SetAttr::default() }).await.unwrap();
        kit.unlink(cx, dir, "link").await.unwrap();
        assert_eq!(errno(kit.lookup(&other_user, dir, "file").await), Errno::EACCES);
    });
}

#[test]
fn everything_can_be_made_and_removed() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let dir = kit.common("d").await;
        let symlink = Make::Symlink { target: b"../\xffnowhere" };
        let link = kit.fs.make(cx, dir, name("l"), symlink).await.unwrap();
        assert_eq!(kit.fs.readlink(cx, link.id).await.unwrap(), b"../\xffnowhere");
        assert_eq!(errno(kit.fs.readlink(cx, dir).await), Errno::EINVAL);
        assert_eq!(errno(kit.fs.open(cx, link.id, OpenHow::READ).await), Errno::ELOOP);
        let rdev = 7 << 8 | 3;
        for (n, mode, rdev) in
            [("p", libc::S_IFIFO, 0), ("s", libc::S_IFSOCK, 0), ("c", libc::S_IFCHR, rdev)]
        {
            let node = kit
                .fs
                .make(cx, dir, name(n), Make::Node { mode: mode | 0o600, rdev })
                .await
                .unwrap();
            assert_eq!((node.attr.mode, node.attr.rdev), (mode | 0o600, rdev));
            assert_eq!(errno(kit.fs.open(cx, node.id, OpenHow::READ).await), Errno::ENXIO);
            let how = CreateHow { exclusive: false, ..create_how(0o644) };
            assert_eq!(errno(kit.fs.create(cx, dir, name(n), how).await), Errno::ENXIO);
            kit.unlink(cx, dir, n).await.unwrap();
        }
        assert_eq!(errno(kit.mkdir(cx, dir, "l", 0o755).await), Errno::EEXIST);
        assert_eq!(errno(kit.unlink(cx, kit.root, "d").await), Errno::EISDIR);
        assert_eq!(
            errno(kit.fs.remove(cx, kit.root, name("d"), RemoveKind::Directory).await),
            Errno::ENOTEMPTY
        );
        kit.unlink(cx, dir, "l").await.unwrap();
        kit.fs.remove(cx, kit.root, name("d"), RemoveKind::Directory).await.unwrap();
        assert_eq!(errno(kit.fs.getattr(cx, dir).await), Errno::ESTALE);
    });
}

// proves: P31
#[test]
fn renames_replace_refuse_and_exchange() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let (one, two) = (kit.common("1").await, kit.common("2").await);
        let a = kit.file(cx, one, "a", 0o644, b"a").await;
        let b = kit.file(cx, two, "b", 0o644, b"b").await;
        let taken = kit.rename(cx, (one, "a"), (two, "b"), RenameHow::NoReplace).await;
        assert_eq!(errno(taken), Errno::EEXIST);
        kit.rename(cx, (one, "a"), (two, "b"), RenameHow::Exchange).await.unwrap();
        assert_eq!(kit.lookup(cx, one, "a").await.unwrap().id, b);
        assert_eq!(kit.lookup(cx, two, "b").await.unwrap().id, a);
        kit.rename(cx, (one, "a"), (two, "b"), RenameHow::Replace).await.unwrap();
        assert_eq!(errno(kit.lookup(cx, one, "a").await), Errno::ENOENT);
        assert_eq!(errno(kit.fs.getattr(cx, a).await), Errno::ESTALE);
        assert_eq!(kit.lookup(cx, two, "b").await.unwrap().id, b);
        assert_eq!(kit.fs.getattr(cx, b).await.unwrap().size, 1);
    });
}

// proves: P35
#[test]
fn hard_links_are_one_file() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let id = kit.file(cx, kit.root, "a", 0o644, b"a").await;
        let linked = kit.fs.link(cx, id, kit.root, name("b")).await.unwrap();
        assert_eq!((linked.id, linked.attr.nlink), (id, 2));
        kit.unlink(cx, kit.root, "a").await.unwrap();
        assert_eq!(kit.lookup(cx, kit.root, "b").await.unwrap().id, id);
        assert_eq!(kit.fs.getattr(cx, id).await.unwrap().nlink, 1);
        assert_eq!(errno(kit.fs.link(cx, kit.root, kit.root, name("r")).await), Errno::EPERM);
    });
}

// proves: P35
#[test]
fn a_file_without_a_name_can_be_given_one() {
    on_each(&Kind::ALL, async |kit| {
        let cx = user(1000, 1000, &[]);
        let dir = kit.common("d").await;
        let made =
            kit.fs.tmpfile(&cx, dir, CreateHow { exclusive: false, ..create_how(0o640) }).await;
        let (entry, file) = match made {
            Err(error) if error.errno() == Errno::ENOTSUP => {
                return eprintln!("left out: no O_TMPFILE here");
            }
            made => made.unwrap(),
        };
        assert_eq!(entry.attr.nlink, 0);
        put(&cx, &*file, 0, b"later").await.unwrap();
        let linked = kit.fs.link(&cx, entry.id, dir, name("n")).await.unwrap();
        assert_eq!((linked.id, linked.attr.nlink, linked.attr.uid), (entry.id, 1, Uid(1000)));
        file.close(&cx).await.unwrap();
        let file = kit.fs.open(&cx, entry.id, OpenHow::READ).await.unwrap();
        assert_eq!(get(&cx, &*file, 0, 10).await.unwrap(), b"later");
    });
}

// proves: P37
#[test]
fn listings_survive_removals() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let dir = kit.common("d").await;
        for number in 0..600 {
            kit.file(cx, dir, &format!("file-{number}"), 0o644, b"").await;
        }
        let open = kit.fs.open(cx, dir, OpenHow::DIRECTORY).await.unwrap();
        let mut seen = std::collections::BTreeSet::new();
        let (mut cookie, mut pages) = (0, 0);
        loop {
            let page = open.readdir(cx, cookie, 2000, pages % 2 == 0).await.unwrap();
            for (n, entry) in page.iter() {
                assert!(seen.insert(n.to_vec()), "{:?} twice", n.escape_ascii().to_string());
                cookie = entry.cookie;
                // What has been listed goes; what has not must still come.
                kit.fs.remove(cx, dir, Name::new(n).unwrap(), RemoveKind::File).await.unwrap();
            }
            pages += 1;
            if page.end {
                break;
            }
        }
        assert_eq!(seen.len(), 600);
        assert!(pages > 10);
    });
}

#[test]
fn listings_with_attributes_say_what_lookup_says() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let dir = kit.common("d").await;
        for number in 0..50 {
            kit.file(cx, dir, &format!("f{number}"), 0o644, &vec![1; number]).await;
        }
        let open = kit.fs.open(cx, dir, OpenHow::DIRECTORY).await.unwrap();
        let page = open.readdir(cx, 0, 1 << 20, true).await.unwrap();
        assert_eq!(page.len(), 50);
        for (n, listed) in page.iter() {
            let found = kit.fs.lookup(cx, dir, Name::new(n).unwrap()).await.unwrap();
            assert_eq!((listed.id, listed.attr), (found.id, Some(found.attr)));
        }
        // A listing can go on at any position that was returned.
        let (_, tenth) = page.get(9).unwrap();
        let rest = open.readdir(cx, tenth.cookie, 1 << 20, false).await.unwrap();
        assert_eq!(rest.len(), 40);
        assert_eq!(rest.get(0).unwrap().0, page.get(10).unwrap().0);
    });
}

#[test]
fn a_parent_is_found_and_the_root_is_its_own() {
    on_each(&Kind::ALL, async |kit| {
        let cx = &kit.root_user;
        let one = kit.common("1").await;
        let two = kit.mkdir(cx, one, "2", 0o755).await.unwrap().id;
        let three = kit.mkdir(cx, two, "3", 0o755).await.unwrap().id;
        assert_eq!(kit.fs.parent(cx, three).await.unwrap().id, two);
        assert_eq!(kit.fs.parent(cx, one).await.unwrap().id, kit.root);
        assert_eq!(kit.fs.parent(cx, kit.root).await.unwrap().id, kit.root);
    });
}

/// Beyond 2048 levels none was found, and each search went up all of them. Of a tree of 4000, whose
/// directories are listed one after the other, that was most of the work.
// proves: P16
#[test]
fn the_parent_of_a_directory_is_found_at_any_depth() {
    const DEPTH: usize = 2500;
    on_each(&[Kind::Tmpfs, Kind::Overlay], async |kit| {
        let cx = &kit.root_user;
        let mut path = vec![kit.common("d").await];
        for _ in 0..DEPTH {
            let made = kit.mkdir(cx, path[path.len() - 1], "d", 0o755).await.unwrap();
            path.push(made.id);
        }
        for pair in path.windows(2).rev().step_by(100) {
            let parent = kit.fs.parent(cx, pair[1]).await.unwrap();
            assert_eq!(parent, kit.fs.parent(cx, pair[1]).await.unwrap());
            assert_eq!(parent.id, pair[0]);
        }
        while let Some(dir) = path.pop().filter(|_| !path.is_empty()) {
            assert_ne!(dir, kit.root);
            let above = path[path.len() - 1];
            kit.fs.remove(cx, above, name("d"), RemoveKind::Directory).await.unwrap();
        }
    });
}

/// A caller in another process of the same client.
fn neighbour(cx: &Context) -> Context {
    Context { pid: Pid(cx.pid.0 + 1), ..cx.clone() }
}

/// Between a lookup and what it was for the name was given to another file, and the caller that had
/// asked for it got ESTALE. At the second time within a system call so did the program.
// proves: P33
#[test]
fn what_was_looked_up_is_there_for_a_moment_after_it_was_replaced() {
    on_each(&Kind::ALL, async |kit| {
        let replacer = &kit.root_user;
        let (reader, other_user) = (neighbour(replacer), replacer.clone().on_behalf_of(NodeId(9)));
        let dir = kit.common("d").await;
        let symlink = |target| Make::Symlink { target };
        // The moment may have passed where the machine is busy: then again.
        for n in 0.. {
            assert!(n < 100, "it is never there");
            kit.file(replacer, dir, "file", 0o644, b"old").await;
            kit.fs.make(replacer, dir, name("link"), symlink(b"old")).await.unwrap();
            kit.file(replacer, dir, "new file", 0o644, b"new").await;
            kit.fs.make(replacer, dir, name("new link"), symlink(b"new")).await.unwrap();
            let file = kit.lookup(&reader, dir, "file").await.unwrap().id;
            let link = kit.lookup(&reader, dir, "link").await.unwrap().id;
            for what in ["file", "link"] {
                kit.lookup(replacer, dir, what).await.unwrap();
                let from = (dir, &*format!("new {what}"));
                kit.rename(replacer, from, (dir, what), RenameHow::Replace).await.unwrap();
            }
            let seen = use_replaced(kit, &reader, (file, link)).await;
            for other in [replacer, &other_user] {
                assert_eq!(errno(kit.fs.getattr(other, file).await), Errno::ESTALE);
                let opened = kit.fs.open(other, file, OpenHow::READ_WRITE).await;
                assert_eq!(errno(opened), Errno::ESTALE, "who has not looked it up");
            }
            for what in ["file", "link"] {
                kit.unlink(replacer, dir, what).await.unwrap();
            }
            match seen {
                Ok(()) => break,
                Err(error) => assert_eq!(error.errno(), Errno::ESTALE),
            }
        }
    });
}

/// Of one that lost its names one by one there were two descriptors, each with those who had looked
/// it up before its name went. The newer one was asked alone.
// proves: P33
#[test]
fn what_lost_several_names_is_there_for_all_who_had_looked_one_up() {
    on_each(&Kind::ALL, async |kit| {
        let remover = &kit.root_user;
        let reader = |node| neighbour(remover).on_behalf_of(NodeId(node));
        let (first, second, other_user) = (reader(7), reader(8), reader(9));
        let dir = kit.common("d").await;
        // The moment may have passed where the machine is busy: then again.
        let found = async || {
            kit.file(remover, dir, "one", 0o644, b"old").await;
            let id = kit.lookup(remover, dir, "one").await.unwrap().id;
            kit.fs.link(remover, id, dir, name("other")).await.unwrap();
            kit.lookup(&first, dir, "other").await.unwrap();
            kit.unlink(remover, dir, "one").await.unwrap();
            kit.lookup(&second, dir, "other").await.unwrap();
            kit.unlink(remover, dir, "other").await.unwrap();
            for cx in [&first, &second] {
                let file = kit.fs.open(cx, id, OpenHow::READ).await?;
                assert_eq!(get(cx, &*file, 0, 10).await.unwrap(), b"old");
                file.close(cx).await.unwrap();
            }
            assert_eq!(errno(kit.fs.getattr(&other_user, id).await), Errno::ESTALE);
            Ok(())
        };
        for n in 0.. {
            assert!(n < 100, "it is never there");
            match found().await {
                Ok(()) => break,
                Err(error) => assert_eq!(Error::errno(&error), Errno::ESTALE),
            }
        }
    });
}

/// What a system call does with what its path led to.
async fn use_replaced(kit: &Kit, cx: &Context, (file, link): (FileId, FileId)) -> Result<()> {
    assert_eq!(kit.fs.readlink(cx, link).await?, b"old");
    assert_eq!(kit.fs.getattr(cx, file).await?.nlink, 0);
    kit.fs.access(cx, file, Access(libc::R_OK as u32)).await?;
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    assert_eq!(kit.fs.setattr(cx, file, mode).await?.mode & 0o7777, 0o600);
    kit.fs.setxattr(cx, file, b"user.x", b"y", XattrSet::Any).await?;
    assert_eq!(kit.fs.getxattr(cx, file, b"user.x").await?, b"y");
    let size = SetAttr { size: Some(2), ..SetAttr::default() };
    kit.fs.setattr(cx, file, size).await?;
    let open = kit.fs.open(cx, file, OpenHow::READ_WRITE).await?;
    assert_eq!(get(cx, &*open, 0, 10).await.unwrap(), b"ol");
    // Open, it stays for good, as any other that was removed.
    dray_rt::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(kit.fs.getattr(cx, file).await?.size, 2);
    assert_eq!(get(cx, &*open, 0, 10).await.unwrap(), b"ol");
    open.close(cx).await
}

/// The file is kept for a moment only, and not at all for the process that removed it.
// proves: D2
#[test]
fn the_space_of_what_was_looked_up_and_removed_is_soon_free() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 64) else { return };
    on(&disk, plain(), async |kit| {
        let cx = &kit.root_user;
        let free = async || kit.fs.statfs(cx).await.unwrap().blocks_free;
        let empty = free().await;
        for looked_by in [cx.clone(), neighbour(cx)] {
            kit.file(cx, kit.root, "large", 0o644, &vec![1; 1 << 20]).await;
            kit.lookup(&looked_by, kit.root, "large").await.unwrap();
            kit.unlink(cx, kit.root, "large").await.unwrap();
            if looked_by.pid == cx.pid {
                assert_eq!(free().await, empty, "nobody else had looked");
            }
            let soon = async {
                while free().await != empty {
                    dray_rt::sleep(std::time::Duration::from_millis(10)).await;
                }
            };
            dray_rt::timeout(std::time::Duration::from_secs(60), soon).await.expect("it is kept");
        }
    });
}
