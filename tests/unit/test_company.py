"""One handler alone in its process: the others have time to end first, and begin again only after it."""

import asyncio
import gc

from rabbitdlq.consumer.company import Company


class Member:
    """A consumer, of which only the number of handlers counts."""

    def __init__(self, company: Company, at_work: int = 0) -> None:
        self.at_work = at_work
        self._company = company
        company.join(self)

    def ends_one(self) -> None:
        self.at_work -= 1
        self._company.left()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_is_alone_when_the_last_of_the_others_has_ended() -> None:
    company = Company()
    one, two = Member(company, 1), Member(company, 2)
    got: list[bool] = []

    async def lonely() -> None:
        async with company.alone("me", 10) as alone:
            got.append(alone)

    task = asyncio.create_task(lonely())
    for member in (two, one, two):
        await turns()
        assert (got, company.holder) == ([], "me")
        member.ends_one()
    await task
    assert (got, company.holder) == ([True], None)


async def test_others_wait_until_it_is_over_and_for_the_next_that_has_to_be_alone() -> None:
    company = Company()
    over = [asyncio.Event(), asyncio.Event()]
    seen: list[object] = []

    async def lonely(number: int) -> None:
        async with company.alone(number, 10) as alone:
            assert alone
            seen.append(number)
            await over[number].wait()

    async def other() -> None:
        await company.opened()
        seen.append("other")

    await asyncio.wait_for(company.opened(), 1)
    tasks = [asyncio.create_task(each) for each in (lonely(0), lonely(1), other())]
    await turns()
    assert seen == [0]
    over[0].set()
    await turns()
    assert seen == [0, 1]
    over[1].set()
    await asyncio.gather(*tasks)
    assert seen == [0, 1, "other"]


async def test_others_that_take_long_are_not_waited_for_without_end_and_a_turn_neither() -> None:
    company = Company()
    member = Member(company, 1)
    async with company.alone("me", 0.01) as alone:
        assert (alone, member.at_work) == (True, 1), "it is not alone, but nobody else begins"
        assert company.holder == "me"
        async with company.alone("second", 0.01) as second:
            assert not second
        assert company.holder == "me"
    assert company.holder is None


async def test_one_that_is_given_up_lets_the_others_go_on_and_its_end_changes_nothing_for_the_next() -> None:
    company = Company()
    async with company.alone("deaf", 10):
        waiting = asyncio.create_task(company.opened())
        await turns()
        company.let_go("somebody else")
        await turns()
        assert not waiting.done()
        company.let_go("deaf")
        await asyncio.wait_for(waiting, 1)
        async with company.alone("next", 10) as alone:
            assert alone
            company.let_go("deaf")
            assert company.holder == "next"
    assert company.holder is None
    async with company.alone("last", 10) as alone:
        assert alone


async def test_one_that_is_to_stop_waits_for_nobody_and_one_that_has_left_is_not_waited_for() -> None:
    company = Company()
    member, stopping = Member(company, 1), asyncio.Event()

    async def lonely() -> None:
        async with company.alone("me", 10, stopping.is_set):
            await company.opened(stopping.is_set)

    task = asyncio.create_task(lonely())
    await turns()
    stopping.set()
    company.ask_again()
    await asyncio.wait_for(task, 1)

    task = asyncio.create_task(company.opened(stopping.is_set))
    await asyncio.wait_for(task, 1)
    company.leave(member)
    async with company.alone("me", 10) as alone:
        assert alone


async def test_a_member_that_is_gone_counts_no_longer_and_each_loop_has_a_company() -> None:
    company = Company.of_this_loop()
    assert Company.of_this_loop() is company

    async def of_another() -> Company:
        return Company.of_this_loop()

    assert await asyncio.to_thread(asyncio.run, of_another()) is not company
    member = Member(company, 1)
    del member
    gc.collect()
    async with company.alone("me", 10) as alone:
        assert alone
