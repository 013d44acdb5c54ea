use super::*;
use proptest::prelude::*;

fn table(name: &str, rows: u64, width: u32) -> Table {
    Table {
        name: name.into(),
        rows,
        width,
        lookups: 1.0,
        unique: 1.0,
        ranked: true,
        row_state: 1,
        value_state: 0,
    }
}

const PLAN: &str = r#"
world = 3

[[shards]]
table = "b"
rank = 1

[[shards]]
table = "a"
rows = [0, 50]
rank = 2

[[shards]]
table = "a"
rows = [50, 100]
columns = [0, 8]
rank = 0

[[shards]]
table = "a"
rows = [50, 100]
columns = [8, 16]
rank = 1
"#;

fn tables() -> Vec<Table> {
    vec![table("a", 100, 16), table("b", 7, 4)]
}

#[test]
fn files_round_trip_and_owners_are_found() {
    let tables = tables();
    let p = Placement::from_toml("plan.toml", PLAN, &tables).expect("a plan");
    assert_eq!(Placement::from_toml("again", &p.to_toml(&tables), &tables), Ok(p.clone()));
    assert_eq!((p.world(), p.shards().len()), (3, 4));
    let ranks = |table, row| p.owner_of(table, row).map(|s| (s.rank, s.columns.clone())).collect::<Vec<_>>();
    assert_eq!(ranks(0, 49), [(2, 0..16)]);
    assert_eq!(ranks(0, 50), [(0, 0..8), (1, 8..16)]);
    assert_eq!(ranks(1, 6), [(1, 0..4)]);
    let of: Vec<usize> = p.shards_of(1).map(|s| s.table).collect();
    assert_eq!(of, [0, 1]);
    assert_eq!(p.shards_of_table(1), [Shard::whole(1, &tables[1], 1)]);
    assert_eq!(p.shards()[0].bytes(&tables), 4 * 50 * 17);
    // any name is one
    let odd = vec![table("a \"b\" \n\u{1}", 3, 4)];
    let p = Placement::new(1, vec![Shard::whole(0, &odd[0], 0)], &odd).expect("a plan");
    assert_eq!(Placement::from_toml("odd", &p.to_toml(&odd), &odd), Ok(p));
}

#[test]
fn mistakes_are_named() {
    let wrong = |from: &str, to: &str| {
        let text = PLAN.replacen(from, to, 1);
        assert_ne!(text, PLAN);
        Placement::from_toml("plan.toml", &text, &tables()).expect_err(to).to_string()
    };
    for (from, to, message) in [
        ("table = \"b\"", "table = \"c\"", "plan.toml:5: table \"c\" is none of this model's; they are a, b"),
        ("rank = 1", "rank = 3", "plan.toml:6: b: rank = 3, but world = 3: ranks go from 0 to 2"),
        ("world = 3", "world = 0", "plan.toml:2: world = 0, expected 1 to 65536 ranks"),
        (
            "[50, 100]",
            "[50, 101]",
            "plan.toml:15: a: rows = [50, 101], expected [first, end] with first below end and end at most 100",
        ),
        (
            "[8, 16]",
            "[16, 8]",
            "plan.toml:22: a: columns = [16, 8], expected [first, end] with first below end and end at most 16",
        ),
        (
            "[0, 50]",
            "[0, 51]",
            "plan.toml:14: a: rows 50 to 51, columns 0 to 8 are on rank 2 already (line 9)",
        ),
        (
            "[0, 50]",
            "[1, 50]",
            "plan.toml: a: rows 0 to 1, columns 0 to 16 are on no rank; add [[shards]] with them",
        ),
        (
            "columns = [8, 16]",
            "columns = [12, 16]",
            "plan.toml: a: rows 50 to 100, columns 8 to 12 are on no rank; add [[shards]] with them",
        ),
    ] {
        assert_eq!(wrong(from, to), message);
    }
    assert_eq!(
        wrong("columns = [8, 16]", "colums = [8, 16]"),
        "plan.toml:22: not a plan: unknown field `colums`, expected one of `table`, `rows`, `columns`, `rank`"
    );
    assert!(wrong("rank = 1", "").starts_with("plan.toml:4: not a plan: missing field `rank`"));
    assert!(wrong("rank = 1", "rank = \"x\"").starts_with("plan.toml:6: not a plan: invalid type"));
    assert!(wrong("rank = 1", "rank = -1").starts_with("plan.toml:6: not a plan: "));
    assert!(wrong("world", "[[").starts_with("plan.toml:2: not a plan: "));
    assert!(wrong("world = 3", "").starts_with("plan.toml:1: not a plan: missing field `world`"));
    // a table that has grown since
    let p = Placement::from_toml("plan.toml", PLAN, &tables()).expect("a plan");
    let e = p.validate(&[table("a", 100, 16), table("b", 9, 4)]).expect_err("two rows more").to_string();
    assert_eq!(e, "b: rows 7 to 9, columns 0 to 4 are on no rank; add [[shards]] with them");
}

/// A table cut into a grid, and how many ranks.
fn grids() -> impl Strategy<Value = (u64, u32, Vec<u64>, Vec<u32>, usize)> {
    let cuts = (prop::collection::vec(0u64..60, 0..4), prop::collection::vec(0u32..20, 0..4));
    (1u64..60, 1u32..20, cuts, 1usize..5).prop_map(|(rows, width, (r, c), world)| {
        let mut r: Vec<u64> = r.into_iter().map(|x| x % rows).chain([0, rows]).collect();
        let mut c: Vec<u32> = c.into_iter().map(|x| x % width).chain([0, width]).collect();
        r.sort_unstable();
        r.dedup();
        c.sort_unstable();
        c.dedup();
        (rows, width, r, c, world)
    })
}

proptest! {
    #[test]
    fn every_grid_is_a_placement_and_every_damage_is_seen(
        (rows, width, r, c, world) in grids(), pick in any::<prop::sample::Index>(), kind in 0..3
    ) {
        let tables = vec![table("t", rows, width)];
        let mut shards = vec![];
        for rows in r.windows(2) {
            for columns in c.windows(2) {
                let rank = shards.len() % world;
                shards.push(Shard { table: 0, rows: rows[0]..rows[1], columns: columns[0]..columns[1], rank });
            }
        }
        let p = Placement::new(world, shards.clone(), &tables).expect("a placement");
        for row in 0..rows {
            let columns: Vec<u32> = p.owner_of(0, row).flat_map(|s| s.columns.clone()).collect();
            prop_assert_eq!(columns, (0..width).collect::<Vec<_>>());
        }
        let back = Placement::from_toml("t", &p.to_toml(&tables), &tables);
        prop_assert_eq!(back, Ok(p));
        let i = pick.index(shards.len());
        match kind {
            0 => { shards.remove(i); }
            1 => shards.push(shards[i].clone()),
            _ => shards[i].rank = world,
        }
        prop_assert!(Placement::new(world, shards, &tables).is_err());
    }
}
